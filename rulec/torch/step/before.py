"""The numbers of parameters before a move within a step, and the way back, wherever their memory is then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rulec.compiler.weights import is_part
from rulec.errors import TensorError
from rulec.torch.tensors.memory import plain_memory
from rulec.torch.tensors.tensors import holds_all

#: A parameter, and a name in its state: that of the memory beside a parameter of 16 bits, or None for the parameter.
Key = tuple[Tensor, str | None]


class Before:
    """Copies of parameters, and of the memory beside those of 16 bits in `state`, the states by parameter.

    Others may give a parameter other memory meanwhile, as by `param.data = ...`, or its state another tensor: the
    numbers go to where they are then. `names` are the parameters' in messages.
    """

    def __init__(self, params: Sequence[Tensor], names: Sequence[str], state: Mapping[Any, Any]) -> None:
        self._names = dict(zip(map(id, params), names, strict=True))
        keys: list[Key] = [(param, None) for param in params]
        keys += [(param, name) for param in params for name in state.get(param, ()) if is_part(name)]
        with plain_memory():
            self._copies = [(key, tensor.detach().clone()) for key, tensor in zip(keys, _now(keys, state), strict=True)]

    def put_back(self, state: Mapping[Any, Any]) -> None:
        """Gives the parameters, and the memory beside them, the numbers of before.

        These are the same bits, or in a parameter of another dtype the same numbers rounded to it. TensorError for a
        parameter of another shape, or without memory, after all others are back.
        """
        now = _now([key for key, _ in self._copies], state)
        fits = [_takes(tensor, copy) for tensor, (_, copy) in zip(now, self._copies, strict=True)]
        back = [(tensor.detach(), copy) for tensor, (_, copy), fit in zip(now, self._copies, fits, strict=True) if fit]
        with plain_memory():
            torch._foreach_copy_([tensor for tensor, _ in back], [copy for _, copy in back])
        if not all(fits):
            (param, _), _ = self._copies[fits.index(False)]
            raise TensorError(
                f"{self._names[id(param)]} was given another shape or device, or no memory, between two evaluations of "
                f"the model in one step, and cannot be put back where it was; all others are: change it between steps"
            )


def _now(keys: Sequence[Key], state: Mapping[Any, Any]) -> list[Any]:
    """The tensors of these keys as they are now; None where the state has none."""
    return [param if name is None else state.get(param, {}).get(name) for param, name in keys]


def _takes(tensor: Any, copy: Tensor) -> bool:
    """Whether a tensor has a place for all numbers of a copy."""
    return (
        isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.shape == copy.shape
        and tensor.device == copy.device and holds_all(tensor)
    )  # fmt: skip
