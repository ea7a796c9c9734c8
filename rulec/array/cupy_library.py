"""What CuPy arrays are worked on with between the stages: CuPy itself, on the current device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rulec.array.arrays import numpy_dtype
from rulec.array.cupy_functions import arithmetic, matrix
from rulec.compiler import random
from rulec.compiler.reductions import REDUCTIONS
from rulec.language.node import Op


class CupyLibrary:
    """CuPy on the current device, which is never waited for, but for decompositions that CuPy itself waits in.

    Numbers known here are NumPy's.
    """

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}

    def hold(self, thing: Any) -> None:
        """Keeps something for good where a CUDA graph is being captured that will read its memory again."""
        import cupy

        if cupy.cuda.get_current_stream().is_capturing():
            self._held[id(thing)] = thing

    @property
    def arithmetic(self) -> Mapping[Op, Callable[..., Any]]:
        """The elementwise operations."""
        return arithmetic()

    @property
    def matrix(self) -> Mapping[Op, Callable[..., Any]]:
        """The matrix functions."""
        return matrix()

    def constant(self, value: float) -> Any:
        """A number known here."""
        return np.float64(value)

    def numbers(self, values: Any) -> Any:
        """A copy on the device, which CuPy makes by way of pinned memory; a CuPy array as it is."""
        import cupy

        return values if isinstance(values, cupy.ndarray) else cupy.asarray(np.asarray(values))

    def read(self, array: Any) -> Any:
        """The array itself, or a copy in float32 of one of 16 bits."""
        return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)

    def write(self, array: Any, values: Any) -> None:
        """Gives the array these values, rounded to its dtype."""
        array[...] = self.numbers(values).reshape(array.shape).astype(array.dtype, copy=False)

    def handed(self, values: Any, dtype: str, own: bool) -> Any:
        """The same array where it will do."""
        import cupy

        made = cupy.ascontiguousarray(self.numbers(values), dtype=np.dtype(dtype))
        return made.copy() if own and made.data.ptr == values.data.ptr else made

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

    def at(self, values: Any, i: int) -> Any:
        """A 0-d array, or a number known here; neither widens the arrays it meets."""
        return values[i] if values.ndim else values

    def take(self, values: Any, places: np.ndarray[Any, Any]) -> Any:
        """The numbers at these places."""
        return values[self.numbers(np.asarray(places, np.int64))]

    def put(self, into: Any, places: np.ndarray[Any, Any] | slice, values: Any) -> None:
        """Writes numbers at these places."""
        given = self.numbers(values).astype(into.dtype, copy=False)
        into[places if isinstance(places, slice) else self.numbers(np.asarray(places, np.int64))] = given

    def together(self, numbers: Sequence[Any]) -> Any:
        """One array of all."""
        import cupy

        return cupy.concatenate([self.numbers(x).reshape(1).astype(np.float64, copy=False) for x in numbers])

    def stack(self, matrices: Sequence[Any]) -> Any:
        """One after the other."""
        import cupy

        return cupy.concatenate([*matrices])

    def split(self, matrices: Any, count: int) -> Sequence[Any]:
        """Views of one stack."""
        import cupy

        return cupy.split(matrices, count)  # type: ignore[no-any-return]

    def reduce(self, op: Op, values: Any, axes: tuple[int, ...] | None = None) -> Any:
        """By CuPy, in float64."""
        import cupy

        values, kept = self.numbers(values).astype(np.float64, copy=False), axes is not None
        axes = tuple(range(values.ndim)) if axes is None else axes
        if not all(values.shape[axis] for axis in axes):
            shape = tuple(1 if i in axes else n for i, n in enumerate(values.shape)) if kept else ()
            return cupy.full(shape, REDUCTIONS[op].nothing, np.float64)
        function = {Op.SUM: cupy.sum, Op.MIN: cupy.amin, Op.MAX: cupy.amax}[op]
        return function(values, axis=axes, keepdims=kept) if axes else values

    def empty(self, count: int) -> Any:
        """A new array."""
        import cupy

        return cupy.empty(count, np.float64)

    def join(self, arrays: Sequence[Any], axis: int) -> Any:
        """One array of all."""
        import cupy

        return cupy.concatenate([*arrays], axis)

    def product(self, a: Any, b: Any, into: Any = None) -> Any:
        """By CuPy."""
        import cupy

        made = cupy.matmul(a, b)
        return made if into is None else cupy.add(into, made, out=into)

    def random(self, op: Op, count: int, position: Mapping[str, Any], block: int = 0) -> Any:
        """The language's words in integers of 64 bits, and what is made of them in float64."""
        import cupy as cp

        normal = op is Op.NORMAL
        words = self._words(count + count % 2 if normal else count, block, **position)
        uniform = ((words >> 9).astype(np.float64) + 0.5) * 2.0**-23
        if not normal:
            return uniform
        u = uniform.reshape(-1, 2)
        radius, angle = cp.sqrt(-2.0 * cp.log(u[:, 0])), 2.0 * math.pi * u[:, 1]
        return cp.stack([radius * cp.cos(angle), radius * cp.sin(angle)], axis=-1).reshape(-1)[:count]

    def _words(self, count: int, first: int, *, seed: int, tensor: int, draw: int, step: Any) -> Any:
        import cupy as cp

        block = cp.arange(first, first + (count + 3) // 4, dtype=np.int64)
        at = step.astype(np.int64) if isinstance(step, cp.ndarray) else int(step)
        counter = (block & random.WORD, block >> 32, draw, at & random.WORD)
        made = random.rounds(counter, (seed & random.WORD, tensor & random.WORD))
        words = [self.spread(np.int64(x) if isinstance(x, int) else x, block.shape) for x in made]
        return cp.stack(words, axis=-1).reshape(-1)[:count]
