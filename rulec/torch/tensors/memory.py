"""Whether the storages of tensors reach to their last elements: others may shrink a storage, or free it.

`tensor.untyped_storage().resize_(bytes)` leaves each tensor of a storage its shape, as FullyShardedDataParallel does
where it frees parameters between steps. A kernel would read and write beyond such memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, le, mul
from typing import Any

import torch
from torch import Tensor

from rulec.errors import RulecError, StateMismatch, TensorError
from rulec.torch.tensors.dtensor import local_tensor
from rulec.torch.tensors.fake import has_no_memory

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_in_words(count: int) -> str:
    """A number of bytes in the largest unit that is not above it."""
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"


def span_of(tensor: Tensor) -> int:
    """The number of element positions from a strided tensor's first element to its last, both included."""
    if not tensor.numel():
        return 0
    return int(1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))


def bytes_needed(tensor: Tensor) -> int:
    """The bytes from the beginning of a strided tensor's storage to the end of its last element."""
    return (int(tensor.storage_offset()) + span_of(tensor)) * tensor.element_size() if tensor.numel() else 0


def holds_all(tensor: Tensor) -> bool:
    """Whether a strided tensor's storage reaches to its last element; without memory by design, it is said to."""
    return has_no_memory(tensor) or tensor.untyped_storage().nbytes() >= bytes_needed(tensor)


def memory_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The strided tensors that have the memory of a tensor: the indices and values of a sparse one, or itself."""
    return (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else (tensor,)


class Spans:
    """The bytes from the first element to the last of each of some strided tensors, in kernels' `dtype` or their own.

    Later tensors of the same shapes, memory orders and dtypes need as many.
    """

    def __init__(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> None:
        self._item_sizes = [t.element_size() if dtype is None else dtype.itemsize for t in tensors]
        self._bytes = [span_of(t) * size for t, size in zip(tensors, self._item_sizes, strict=True)]
        #: The offsets and the storages' bytes of the last tensors that had all of theirs.
        self._last: tuple[list[Any], list[int]] | None = None

    def are_held(self, tensors: Sequence[Tensor]) -> bool:
        """Whether each storage has these bytes behind the tensor's first element.

        False may mean a tensor without elements; `holds_all` then says True. No Python runs for each tensor.
        """
        now = [*map(_offset, tensors)], [*map(_nbytes, map(_storage, tensors))]
        if now == self._last:
            return True
        offsets, sizes = now
        held = all(map(le, map(add, map(mul, offsets, self._item_sizes), self._bytes), sizes))
        self._last = now if held else self._last
        return held


_offset, _storage, _nbytes = Tensor.storage_offset, Tensor.untyped_storage, torch.UntypedStorage.nbytes


def check_memory(param: Tensor, name: str) -> None:
    """TensorError where the memory of a parameter was resized, and lacks some of its elements."""
    remedy = "give its storage the memory again, as with param.untyped_storage().resize_(bytes)"
    check_holds(param, name, remedy)


def check_gradient_memory(grad: Tensor, name: str) -> None:
    """The same of the gradient of a parameter of this name; of a sparse one, of its indices and values."""
    remedy = "compute the gradient again, or set it to None"
    for part in memory_of(grad):
        check_holds(part, f"the gradient of {name}", remedy)


def check_state_memory(state: Any, name: str) -> None:
    """StateMismatch where a state of this name is a tensor without an element's memory, or is sparse."""
    if not isinstance(state, Tensor) or has_no_memory(state):
        return
    if local_tensor(state).layout is not torch.strided:
        raise StateMismatch(f"{name} is sparse ({local_tensor(state).layout}): give it as a dense tensor")
    check_holds(state, name, "give it the memory again, or load a checkpoint", StateMismatch)


def check_input_memory(value: Tensor, name: str) -> None:
    """TensorError where an input of a step lacks the memory of some of its elements."""
    check_holds(value, f"the input {name!r}", "compute it again")


def check_holds(tensor: Tensor, what: str, remedy: str, error: type[RulecError] = TensorError) -> None:
    """The error for a strided tensor, named as `what`, without all its memory, with a `remedy`."""
    here = local_tensor(tensor)
    if here.layout is not torch.strided or holds_all(here):
        return
    raise error(
        f"{what} has shape {tuple(here.shape)} and memory of {here.untyped_storage().nbytes()} bytes, where it needs "
        f"{bytes_needed(here)}: its storage was freed or resized; {remedy}"
    )
