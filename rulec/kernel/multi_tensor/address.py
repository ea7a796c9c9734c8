"""The addresses of arrays: NumPy's, and PyTorch's on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rulec.array_api.slices import Together


def element_count(tensor: Any) -> int:
    """The number of elements of a NumPy array or a PyTorch tensor."""
    return int(tensor.size if isinstance(tensor, np.ndarray) else tensor.numel())


def address_of(tensors: Sequence[Any]) -> Callable[[Any], int]:
    """The function for the address of the first element of such tensors."""
    if tensors and not isinstance(tensors[0], np.ndarray):
        return type(tensors[0]).data_ptr  # type: ignore[no-any-return]
    return array_address


class Located(Sequence[Any]):
    """Arrays whose addresses are known; `read` gives an array by its place, where someone asks for it."""

    def __init__(self, addresses: np.ndarray[Any, np.dtype[np.int64]], read: Callable[[int], Any]) -> None:
        self.addresses, self._read = addresses, read
        self._parts: dict[int, tuple[Sequence[int], np.ndarray[Any, np.dtype[np.int64]], Located]] = {}

    def __len__(self) -> int:
        return len(self.addresses)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self._read(i) for i in range(*place.indices(len(self)))]
        if not 0 <= place < len(self):
            raise IndexError(place)
        return self._read(place)

    def of(self, places: Sequence[int]) -> Located:
        """The arrays at some places, as they are now; the same list of places is to hold the same places."""
        part = self._parts.get(id(places))
        if part is None or part[0] is not places:
            at, read = np.array(places, np.int64), self._read
            if len(self._parts) >= _PARTS:
                self._parts.clear()
            part = places, at, Located(self.addresses[at], lambda i: read(places[i]))
            self._parts[id(places)] = part
        np.take(self.addresses, part[1], out=part[2].addresses)
        return part[2]


#: Most lists of places that an object remembers.
_PARTS = 64


def chosen(arrays: Sequence[Any], places: Sequence[int]) -> Sequence[Any]:
    """The arrays at some places."""
    return arrays.of(places) if isinstance(arrays, Located) else [arrays[i] for i in places]


def addresses_of(arrays: Sequence[Any], address: Callable[[Any], int]) -> Any:
    """The address of each array."""
    if isinstance(arrays, Together):
        return arrays.addresses(address)
    return arrays.addresses if isinstance(arrays, Located) else [*map(address, arrays)]


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
