"""Checks of arrays for C: elements one after the other from an address in main memory on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rulec.errors import TensorError


def require_memory(name: str, arrays: Sequence[Any]) -> None:
    """TensorError unless all these NumPy arrays or PyTorch tensors are dense in main memory.

    `name` is the buffer's, for the message.
    """
    for index, array in enumerate(arrays):
        fault = _fault(array)
        if fault:
            raise TensorError(f"{name} of tensor {index} {fault}")


def _fault(array: Any) -> str:
    """The fault of an array and its remedy, in words; empty for a good array."""
    if isinstance(array, np.ndarray):
        if not array.flags.aligned:
            return "does not begin at a multiple of its elements' size: copy it"
        return "" if array.flags.forc or _is_dense(array.shape, _steps(array)) else _SCATTERED
    if not hasattr(array, "data_ptr"):
        return f"is of type {type(array).__name__}: the c backend takes NumPy arrays and PyTorch tensors"
    if array.device.type != "cpu":
        return f"is on {array.device}, and the c backend works in main memory: choose the backend of that device"
    return "" if array.is_contiguous() or _is_dense(array.shape, array.stride()) else _SCATTERED


_SCATTERED = "is not contiguous: make it so"


def _steps(array: np.ndarray[Any, Any]) -> list[int]:
    """The strides of an array in elements. A stride of no whole number is 0 here, as in no dense array."""
    return [step // array.itemsize if step % array.itemsize == 0 else 0 for step in array.strides]


def _is_dense(shape: Sequence[int], steps: Sequence[int]) -> bool:
    """Whether elements lie one after the other, in any order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(steps, shape, strict=True) if size != 1):
        if step != expected:
            return 0 in shape
        expected *= size
    return True
