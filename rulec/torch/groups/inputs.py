"""The inputs of a step beside gradients, for rules that name them under `inputs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rulec.errors import TensorError
from rulec.language.inputs import LIKE_P, SCALAR, InputKind, per_tensor
from rulec.torch.tensors.dtensor import is_dtensor
from rulec.torch.tensors.fake import plain_memory
from rulec.torch.tensors.memory import check_input_memory
from rulec.torch.tensors.sections import Section
from rulec.torch.tensors.tensors import real_view


class Inputs:
    """The inputs of one step.

    `kinds` says of each what the rule takes: a number (a tensor of one number will do), or a tensor for each parameter:
    a mapping from parameters, or a sequence with a tensor for each of all parameters (None where there is no gradient).
    A parameter needs no matrix with a shape of its own where its rule reads none. `loss` is the input of that name,
    where there is no other. TensorError for what does not fit.
    """

    def __init__(
        self, kinds: Mapping[str, InputKind], inputs: Mapping[str, Any], params: Sequence[Tensor], loss: Any = None
    ) -> None:
        self._numbers: dict[str, Any] = {}
        self._tensors: dict[str, Mapping[Tensor, Any]] = {}
        self._kinds = kinds
        if loss is not None and "loss" in kinds:
            inputs = {"loss": loss, **inputs}
        for name, value in inputs.items():
            if per_tensor(kinds.get(name, SCALAR)):
                self._tensors[name] = by_parameter(name, value, params)
            else:
                self._numbers[name] = _number(name, value)

    def of(
        self, seen: Sequence[tuple[Tensor, Section | None]], places: Sequence[int] | None
    ) -> dict[str, Any]:  # fmt: skip
        """The inputs for parameters or sections, or for those with the indices `places`."""
        chosen = seen if places is None else [seen[i] for i in places]
        tensors = {
            name: [self._of_parameter(name, tensors_of.get(param), param, section) for param, section in chosen]
            for name, tensors_of in self._tensors.items()
        }
        return self._numbers | tensors

    def _of_parameter(self, name: str, value: Any, param: Tensor, section: Section | None) -> Any:
        return _like(name, value, param, section) if self._kinds[name] == LIKE_P else _matrix(name, value, param)


def _number(name: str, value: Any) -> Any:
    """A number, or where it is on a device a tensor of one: who needs it reads it there."""
    if isinstance(value, Tensor):
        check_input_memory(value, name)
    try:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return value.detach().reshape(())
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise TensorError(f"the input {name!r} must be a number, not {type(value).__name__} {value!r:.40}") from None


def by_parameter(name: str, value: Any, params: Sequence[Tensor]) -> Mapping[Tensor, Any]:
    """The tensors of an input by their parameters; TensorError for a list of another length."""
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, Sequence) or len(value) != len(params):
        count = len(value) if isinstance(value, Sequence) else f"a {type(value).__name__}"
        raise TensorError(
            f"the input {name!r} must be a dict by parameter, or a list with a tensor for each of the {len(params)} "
            f"parameters, not {count}"
        )
    return dict(zip(params, value, strict=True))


def _matrix(name: str, value: Any, param: Tensor) -> Any:
    """A matrix with a shape of its own, of a parameter or of each of its sections."""
    if not isinstance(value, Tensor):
        return value
    if is_dtensor(value) or value.layout is not torch.strided or value.is_complex():
        kind = "a DTensor" if is_dtensor(value) else "complex" if value.is_complex() else f"sparse ({value.layout})"
        raise TensorError(
            f"the input {name!r} of a parameter of shape {tuple(param.shape)} is {kind}: give a dense, real tensor of "
            f"the whole matrix, the same on every rank"
        )
    check_input_memory(value, name)
    with plain_memory():
        return value.detach()


def _like(name: str, value: Any, param: Tensor, section: Section | None) -> Tensor:
    if not isinstance(value, Tensor):
        raise TensorError(
            f"the input {name!r} has no tensor for a parameter of shape {tuple(param.shape)} that has a gradient"
        )
    check_input_memory(value, name)
    with plain_memory():
        like = real_view(value.to(param.dtype if param.is_complex() or not value.is_complex() else value.dtype))
        return like if section is None else section.of(like)
