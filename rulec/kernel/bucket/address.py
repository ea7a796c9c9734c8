"""The addresses of arrays: NumPy's, and PyTorch's on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def element_count(tensor: Any) -> int:
    """The number of elements of a NumPy array or a PyTorch tensor."""
    return int(tensor.size if isinstance(tensor, np.ndarray) else tensor.numel())


def address_of(tensors: Sequence[Any]) -> Callable[[Any], int]:
    """The function for the address of the first element of such tensors."""
    if tensors and not isinstance(tensors[0], np.ndarray):
        return type(tensors[0]).data_ptr  # type: ignore[no-any-return]
    return array_address


def _slow_array_address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _fast_array_address(array: np.ndarray[Any, Any]) -> int:
    """The same, six times as fast: NumPy's ABI has the address right behind the object's header."""
    return _WORD.from_address(id(array) + _HEADER).value


_WORD = ctypes.c_size_t
_HEADER = object.__basicsize__
_PROBE = np.zeros(3)[1:]
_ABI_IS_KNOWN = _fast_array_address(_PROBE) == _slow_array_address(_PROBE)
array_address = _fast_array_address if _ABI_IS_KNOWN else _slow_array_address
