"""States of fused parameters: those of their sections, joined as the parameters are.

A section has states of its own, as a parameter would. A state of elements, rows or columns is saved as the state of the
whole parameter: sections follow one another along the split dimension. So a parameter goes on from it with or without
the split. Other states are saved for each section. Codes of sections begin with blocks of their own, and are saved as
codes of the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.compiler.layout import scale_name
from rulec.compiler.view import MatrixView
from rulec.errors import StateMismatch
from rulec.formats import Format
from rulec.torch.states.quantized import CODES, elements_here, joined_codes, values_here
from rulec.torch.tensors.dtensor import as_part, fill, is_dtensor, kept_placement, local_tensor
from rulec.torch.tensors.fake import is_fake
from rulec.torch.tensors.sections import Section
from rulec.torch.tensors.tensors import real_view


def of_section(name: str, number: int) -> str:
    """The name of a state of one section, as `m.1`."""
    return f"{name}.{number}"


@dataclass(frozen=True)
class SectionState:
    """A state of a section: its local tensor, its axes (none for a shape of its own), and the view of the section.

    `shown` is the state of this section alone, as a checkpoint has it. A quantized state
    has a `format`, and `scales`.
    """

    here: Tensor
    letters: str
    view: MatrixView
    shown: Tensor
    format: Format | None = None
    scales: Tensor | None = None

    @property
    def is_like_parameter(self) -> bool:
        """Whether it has a number for each element."""
        return {"i", "j"} <= {*self.letters}

    def apart(self, name: str, number: int) -> dict[str, Tensor]:
        """The state under this name as a checkpoint has it of the section with this number alone."""
        if self.scales is None:
            return {of_section(name, number): self.shown}
        return {of_section(name + CODES, number): self.here, of_section(scale_name(name), number): self.scales}

    def place(self, dim: int) -> int:
        """The dimension of the state that a dimension of the parameter is."""
        count = len(self.view.shape)
        turned = self.view.transposed and not self.is_like_parameter and dim >= count - 2
        return 2 * count - 3 - dim if turned else dim


def joined(states: Sequence[SectionState], sections: Sequence[Section], param: Any) -> Tensor | None:
    """Joins a state of all sections to one tensor, a copy with the parameter's placement.

    None for a state that has neither elements, rows nor columns of the parameter.
    """
    first, dim = states[0], sections[0].dim
    at = first.place(dim)
    if not {*first.letters} & {*"bij"} or any(state.letters != first.letters for state in states):
        return None
    if any(state.here.dim() != param.dim() or state.place(dim) != at for state in states):
        return None
    beside = [(*state.here.shape[:at], *state.here.shape[at + 1 :]) for state in states]
    if len({*beside}) > 1 or any(state.here.dtype != first.here.dtype for state in states):
        return None
    here = torch.cat([state.here for state in states], at)
    if not is_dtensor(param):
        return here
    if first.is_like_parameter:
        return as_part(here, param.shape, param.stride(), param)
    shape = [1] * param.dim()
    for axis, size in enumerate(param.shape):
        kept = first.view.axis(axis) in first.letters
        shape[first.place(axis)] = size if kept else len(sections) if axis == dim else 1
    stride = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    placements = [kept_placement(p, first.view, first.letters, first.place) for p in param.placements]
    return as_part(here, shape, stride, param, placements)


def all_joined(
    states: Sequence[Mapping[str, SectionState]], sections: Sequence[Section], param: Any
) -> dict[str, Tensor]:  # fmt: skip
    """The joined states by name, where there are any; `states` has a mapping for each section."""
    common = [name for name in states[0] if name != "step" and all(name in each for each in states)]
    names = [name for name in common if not any(each[name].format for each in states)]
    whole = {name: joined([each[name] for each in states], sections, param) for name in names}
    return {name: value for name, value in whole.items() if value is not None}


def _all_codes(
    states: Sequence[Mapping[str, SectionState]], sections: Sequence[Section], param: Any
) -> dict[str, Tensor]:  # fmt: skip
    """The codes and scales of the parameter, of each state in one format in all sections."""
    saved: dict[str, Tensor] = {}
    for name, first in states[0].items():
        alike = [each[name] for each in states if name in each and each[name].format == first.format]
        pairs = [(state.here, state.scales) for state in alike if state.scales is not None]
        if first.format is not None and len(pairs) == len(states):
            saved[name + CODES], saved[scale_name(name)] = joined_codes(first.format, pairs, sections, param)
    return saved


def saved_of_sections(
    states: Sequence[Mapping[str, SectionState]], sections: Sequence[Section], param: Any, skips: bool
) -> dict[str, Tensor]:  # fmt: skip
    """The states of a fused parameter as they are saved; where `skips`, sections may have other step counts."""
    saved = all_joined(states, sections, param) | _all_codes(states, sections, param)
    for section, each in zip(sections, states, strict=True):
        for name, state in each.items():
            if name == "step" and not (section.number and skips):
                saved.setdefault("step", state.here)
            elif not {name, name + CODES} & saved.keys() or name == "step":
                saved |= state.apart(name, section.number)
    return saved


def loaded_of_sections(
    saved: Mapping[str, Any], before: Mapping[str, Format], states: Sequence[Mapping[str, SectionState]],
    sections: Sequence[Section], param: Any, owner: str,
) -> list[dict[str, Any]]:  # fmt: skip
    """The saved states of each section, of those of a fused parameter: joined, or one by one.

    `before` has the formats of joined quantized states. StateMismatch for a joined state of another shape or placement.
    """
    each: list[dict[str, Any]] = []
    for section in sections:
        suffix = of_section("", section.number)
        mine = {name.removesuffix(suffix): value for name, value in saved.items() if name.endswith(suffix)}
        each.append({"step": saved["step"], **mine} if "step" in saved else mine)
    coded = {name for of in states for name, state in of.items() if state.format is not None}
    for name in (coded | before.keys()) & saved.keys():
        for key, whole in _elements_here(name, saved, before.get(name), param, owner).items():
            for mine, section in zip(each, sections, strict=True):
                mine.setdefault(key, section.of(whole))
    for name, whole in all_joined(states, sections, param).items():
        if name not in saved or name in before:
            continue
        if not is_fake(local_tensor(whole)):
            _check_shape(saved[name], whole, f"{name} of {owner}")
            fill(whole, torch.as_tensor(saved[name]), owner)
        at = states[0][name].place(sections[0].dim)
        parts = torch.split(local_tensor(whole), [of[name].here.shape[at] for of in states], at)
        for mine, part in zip(each, parts, strict=True):
            mine.setdefault(name, part)
    return each


def _elements_here(
    name: str, saved: Mapping[str, Any], before: Format | None, param: Any, owner: str
) -> dict[str, Tensor]:  # fmt: skip
    """A saved state of local elements: its values, or a code and a scale of each."""
    state = f"{name} of {owner}"
    if before is not None:
        scale = scale_name(name)
        return dict(zip((name, scale), elements_here(before, saved[name], saved[scale], param, state), strict=True))
    _check_shape(saved[name], param, state)
    return {name: torch.from_numpy(values_here(saved[name], param, owner)).reshape(real_view(param).shape)}


def _check_shape(saved: Any, wanted: Tensor, state: str) -> None:
    if tuple(np.shape(saved)) != tuple(wanted.shape):
        raise StateMismatch(
            f"{state} was saved with shape {tuple(np.shape(saved))}, where it has {tuple(wanted.shape)}"
        )
