"""Reads of parameters inside a backward pass that autograd knows nothing of.

Autograd sees a change of a saved tensor by its version. It knows neither of tensors computed anew inside the pass, nor
of saved ones of `weight.data`. So while a pass is watched every operation is looked at: a parameter that is read after
its gradient was complete must wait for the end of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rulec.torch.fake import is_fake
from rulec.torch.placed import part_of


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, calls `noted(place, operation)` for every parameter, or view of one, that is looked at."""

    def __init__(self, params: Sequence[Tensor], noted: Callable[[int, str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted = noted
        here = ((place, part_of(param)) for place, param in enumerate(params))
        self._places = {_memory(p): place for place, p in here if p.numel() and not is_fake(p)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation, after it was looked at."""
        if self._places:
            for tensor in _tensors((*args, *(kwargs or {}).values())):
                place = self._places.get(_memory(part_of(tensor)), -1)
                if place >= 0:
                    self._noted(place, str(func))
        return func(*args, **(kwargs or {}))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, and in lists among them, that have memory."""
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided and not is_fake(value):
                yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _memory(tensor: Tensor) -> int:
    """Where the memory begins that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()
