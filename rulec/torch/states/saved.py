"""Checks of a saved state before anything of it is loaded, and first steps that only ask for states.

Damage is refused by name, and nothing is written.

torch's `get_optimizer_state_dict` and `set_optimizer_state_dict` have an optimizer make its states by a step with
`lr=0` and gradients of zeros, and so has torchtitan. Such a step makes the states, at the learning rates that the
groups had before it. It updates no parameter and counts as no update, so a run goes on as one without it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.compiler.layout import scale_name
from rulec.compiler.weights import KINDS, is_part
from rulec.errors import HyperError, StateMismatch
from rulec.formats import UNBIASED, of_key
from rulec.runtime.buckets.scalar_table import is_count
from rulec.torch.distributed.cross_process import Across
from rulec.torch.distributed.devices import device_of
from rulec.torch.groups.values import Groups
from rulec.torch.states.interop.load import flattened
from rulec.torch.states.quantized import CODES
from rulec.torch.tensors.dtensor import is_dtensor, local_tensor
from rulec.torch.tensors.fake import has_no_memory, plain_memory

#: The key of a group for the formats of its quantized states: torch's name of a state -> the key of its format.
FORMATS = "formats"

#: The number of a section behind the name of its state.
_SECTION = re.compile(r"\.\d+$")

#: dtypes of codes; floats are never saved in them.
_BYTES = (torch.uint8, torch.int8)


def check_formats(groups: Sequence[Mapping[str, Any]]) -> None:
    """StateMismatch where `formats` of a group is no mapping from states to keys of formats."""
    for group in groups:
        formats = group.get(FORMATS, {})
        if not isinstance(formats, Mapping):
            raise StateMismatch(
                f"formats={formats!r:.80} of a group must be a dict of states and the keys of their formats: load the "
                f"groups that state_dict() returned"
            )
        for state, key in formats.items():
            try:
                known = isinstance(key, str) and (key == UNBIASED or bool(of_key(key)))
            except HyperError as error:
                raise StateMismatch(f"formats of a group has {state!r}: {error}") from None
            if not known:
                raise StateMismatch(f"formats of a group has {key!r:.80} for {state!r}, which is no key of a format")


def check_states(states: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """StateMismatch where groups do not list parameters, or what is saved of one is no dict."""
    for group in groups:
        for key, kind in (("params", "numbers"), ("param_names", "names")):
            listed = group.get(key, [])
            if not isinstance(listed, list | tuple):
                raise StateMismatch(f"{key}={listed!r:.80} of a saved group must be a list of {kind}")
        names = group.get("param_names") or [f"parameter {place}" for place in group["params"]]
        for place, name in zip(group["params"], names, strict=False):
            known = isinstance(place, int | str)
            if not known:
                raise StateMismatch(f"params of a saved group has {place!r:.80}: give the groups of state_dict()")
            if not isinstance(states.get(place, {}), Mapping):
                raise StateMismatch(
                    f"the saved state of {name} is a {type(states[place]).__name__}, where it must be a dict of states "
                    f"by name: give all that state_dict() returned"
                )


def check_numbers(groups: Sequence[Mapping[str, Any]], keywords: Set[str]) -> None:
    """StateMismatch where one of these keywords of a group has a tensor of several numbers, or without memory."""
    for group in groups:
        for key in keywords & group.keys():
            value = group[key]
            if isinstance(value, Tensor) and (value.numel() != 1 or value.layout is not torch.strided):
                raise StateMismatch(f"{key} of a group was saved as a tensor of shape {tuple(value.shape)}")


def check_values(saved: Mapping[Any, Any], states: Collection[str], param: Tensor, name: str) -> None:
    """StateMismatch where a value cannot be a state of the parameter of this name; `states` are torch's names."""
    saved = flattened(saved)
    missing = [str(key) for key, value in saved.items() if isinstance(value, Mapping) and not value]
    if missing:
        raise StateMismatch(
            f"the saved state of {name} has no {', '.join(missing)}: a flattened state dict has none where the "
            f"parameter had no gradient before it was saved, or where its states were stored otherwise; load without "
            f"flatten_optimizer_state_dict, or with the state_dtype and weights that were saved"
        )
    for key, value in saved.items():
        if isinstance(value, Tensor):
            _check_tensor(key, value, param, name)
        elif _state(key) in states and not _is_value(value):
            raise StateMismatch(f"{key} of {name} was saved as {value!r:.80}, which is no tensor and no number")
        if isinstance(key, str):
            _check_name(key, saved, states, name)


def _state(key: Any) -> str:
    """The name of the state that an entry is of."""
    return _SECTION.sub("", str(key)).partition("::")[0]


def _is_value(value: Any) -> bool:
    """Whether numbers can be read from a value; None stands for a missing state."""
    numbers = isinstance(value, bool | int | float | complex | np.ndarray | np.number)
    return value is None or numbers or (hasattr(value, "codes") and hasattr(value, "scale"))


def _check_tensor(key: Any, value: Tensor, param: Tensor, name: str) -> None:
    if value.layout is not torch.strided:
        raise StateMismatch(f"{key} of {name} was saved with layout {value.layout}: load it with to_dense()")
    if value.is_quantized:
        raise StateMismatch(f"{key} of {name} was saved as {value.dtype}: load it with dequantize()")
    if has_no_memory(value) and not has_no_memory(param):
        raise StateMismatch(f"{key} of {name} was saved on the device {value.device} without values: load them first")
    if value.is_complex() and not param.is_complex():
        raise StateMismatch(f"{key} of {name} was saved in {value.dtype}, and the parameter is in {param.dtype}")


def _check_name(key: str, saved: Mapping[str, Any], states: Collection[str], name: str) -> None:
    """StateMismatch for a residual without a weight, codes without scales, and scales without codes."""
    plain = _SECTION.sub("", key)
    renamed = plain.replace("_", "::", 1) in KINDS
    if (is_part(plain) or renamed) and plain not in {*KINDS, *states}:
        raise StateMismatch(f"{key} of {name} is no part of a weight: parts are {', '.join(KINDS)}")
    state, number = _state(key), key[len(plain) :]
    scales, codes = (saved.get(state + part + number) is not None for part in (scale_name(""), CODES))
    if plain == state + CODES and not scales:
        raise StateMismatch(f"{key} of {name} was saved without {scale_name(state)}{number}, its scales: save it again")
    if plain == scale_name(state) and not codes and saved.get(state + number) is None:
        raise StateMismatch(f"{key} of {name} was saved without {state}{CODES}{number}, its codes: save it again")
    if plain == state and state in states and not scales and getattr(saved[key], "dtype", None) in _BYTES:
        raise StateMismatch(
            f"{key} of {name} was saved in {saved[key].dtype} without {scale_name(state)}{number}, and codes are no "
            f"values: save it again"
        )


def check_fits(buffers: Mapping[str, Tensor], saved: Mapping[str, Any], name: str, strict: bool) -> None:
    """StateMismatch where a saved state does not fit the buffers of a parameter."""
    if not saved:
        return
    for key, buffer in buffers.items():
        if key not in saved:
            if strict and not is_part(key):  # the residual of a weight of another kind begins with the parameter
                known = ", ".join(sorted(saved))
                raise StateMismatch(f"the saved state of {name} has no {key} (it has {known}): it is of another rule")
            continue
        shape, wanted = tuple(np.shape(saved[key])), tuple(buffer.shape)
        if shape != wanted and not (wanted == () and shape == (1,)):
            raise StateMismatch(f"{key} of {name} was saved with shape {shape}, where it has {wanted}")
        if strict and key == "step" and not (has_no_memory(saved[key]) or is_count(saved[key])):
            raise StateMismatch(f"step of {name} was saved as {saved[key]!r:.80}, which is no count of updates")


def asks_for_states(groups: Groups, across: Across | None = None) -> bool:
    """Whether a first step of these groups asks for states alone: no group has a learning rate, no gradient a number.

    Ranks with other parameters, or with other shards of the same tensors, get the same answer.
    """
    if any(_rate_of(group) for group in groups):
        return False
    params = [p for group in groups for p in group["params"]]
    grads = [p.grad for p in params if p.grad is not None]
    with plain_memory():
        moves = not grads or any(map(_has_number, grads))
        idle = not grads and across is not None
        return not _anywhere(moves and not idle, [p for p in params if is_dtensor(p)], across)


def _rate_of(group: Mapping[str, Any]) -> bool:
    """Whether a group has a learning rate that is not 0. A fake one may be any."""
    rate = group.get("lr", 0.0)
    return has_no_memory(rate) or bool(rate != 0)


def _has_number(grad: Tensor) -> bool:
    """Whether a local gradient has an element that is not 0."""
    here = local_tensor(grad)
    if has_no_memory(here):
        return True
    here = here._values() if here.layout is torch.sparse_coo else here
    return bool((here != 0).any())


def _anywhere(truth: bool, placed: Sequence[Any], across: Across | None) -> bool:
    """Whether `truth` holds in any rank of these DTensors' meshes, and of `across`."""
    meshes = list(dict.fromkeys(param.device_mesh for param in placed))
    groups = [group for mesh in meshes if mesh.get_coordinate() is not None for group in mesh.get_all_groups()]
    groups += [] if across is None else [across.group]
    for group in groups if len(groups) < 2 else [*groups, *groups]:  # two rounds: groups learn from one another
        word = torch.tensor([float(truth)], device=device_of(group, "the optimizer's tensors"))
        torch.distributed.all_reduce(word, torch.distributed.ReduceOp.MAX, group)
        truth = bool(word)
    return truth


@contextmanager
def at_rates(groups: Sequence[dict[str, Any]], rates: Sequence[Any]) -> Iterator[None]:
    """A block with these learning rates in the groups."""
    before = [(group, group["lr"]) for group in groups if "lr" in group]
    try:
        if len(rates) == len(groups):
            for group, rate in zip(groups, rates, strict=True):
                group.update({} if rate is None else {"lr": rate})
        yield
    finally:
        for group, rate in before:
            group["lr"] = rate
