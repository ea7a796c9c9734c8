"""What CuPy arrays are worked on with between the stages: CuPy itself, on the current device."""

from __future__ import annotations

from typing import Any

import numpy as np

from rulec.array.arrays import numpy_dtype
from rulec.array.cupy_functions import arithmetic, functions, matrix
from rulec.arrays.library import ArrayLibrary


class CupyLibrary(ArrayLibrary):
    """CuPy on the current device. Nothing waits for the device, but for CuPy's own decompositions.

    Numbers known here are NumPy's.
    """

    def __init__(self) -> None:
        self.of, self.arithmetic, self.matrix = functions(), arithmetic(), matrix()
        self._held: dict[int, Any] = {}

    def hold(self, thing: Any) -> None:
        """Keeps something for good where a CUDA graph is being captured that will read its memory again."""
        import cupy

        if cupy.cuda.get_current_stream().is_capturing():
            self._held[id(thing)] = thing

    def numbers(self, values: Any) -> Any:
        """A copy on the device, which CuPy makes by way of pinned memory; a CuPy array as it is."""
        import cupy

        return values if isinstance(values, cupy.ndarray) else cupy.asarray(np.asarray(values))

    def write(self, array: Any, values: Any) -> None:
        """Gives the array these values, rounded to its dtype."""
        array[...] = self.numbers(values).reshape(array.shape).astype(array.dtype, copy=False)

    def handed(self, values: Any, dtype: str, copied: bool) -> Any:
        """The same array where it will do."""
        import cupy

        array = cupy.ascontiguousarray(self.numbers(values), dtype=np.dtype(dtype))
        return array.copy() if copied and array.data.ptr == values.data.ptr else array

    def cast(self, values: Any, dtype: str) -> Any:
        """Values in another dtype."""
        return values.astype(numpy_dtype(dtype), copy=False)

    def copy(self, values: Any) -> Any:
        """A copy."""
        return values.copy()

    def spread(self, values: Any, shape: tuple[int, ...]) -> Any:
        """A view; of a number known here, filled memory on the device."""
        import cupy

        if isinstance(values, cupy.ndarray):
            return cupy.broadcast_to(values, shape)
        return cupy.full(shape, values.item(), values.dtype)

    def take(self, values: Any, places: np.ndarray[Any, Any]) -> Any:
        """The numbers at these places."""
        return values[self.numbers(np.asarray(places, np.int64))]

    def put(self, into: Any, places: np.ndarray[Any, Any] | slice, values: Any) -> None:
        """Writes numbers at these places."""
        numbers = self.numbers(values).astype(into.dtype, copy=False)
        into[places if isinstance(places, slice) else self.numbers(np.asarray(places, np.int64))] = numbers
