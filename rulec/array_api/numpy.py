"""NumPy: the definition of array operations. Other libraries are compared with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from rulec.array_api import bits, random
from rulec.array_api.functions import Functions
from rulec.array_api.library import Array, Library
from rulec.array_api.matrix import matrix_functions
from rulec.array_api.reductions import REDUCTIONS
from rulec.language.expr.arithmetic import NUMPY
from rulec.language.expr.node import Op


class NumpyFunctions(Functions):
    """NumPy's functions. Arrays may hold 50-digit numbers."""

    def norm(self, x: Any, dtype: Any) -> Any:
        """By a power: NumPy has it for objects too, and computes a square root for other arrays."""
        return np.sum(x * x, axis=(-2, -1), keepdims=True) ** 0.5

    def order(self, words: Any) -> Any:
        """NumPy has several orders of equal numbers."""
        return np.argsort(words, axis=-1, kind="stable")

    def in_order(self, x: Any) -> Any:
        """NumPy's own order; of 50-digit numbers, which NaN has no place among, in two passes."""
        if x.dtype != object:
            return self.order(x)
        nan = x != x
        order = self.order(np.where(nan, 0, x))
        return np.take_along_axis(order, self.order(np.take_along_axis(nan, order, -1)), -1)

    def ranked(self, x: Any, low: Any, high: Any) -> tuple[Any, Any]:
        """By NumPy's own selection of known ranks; a zero has no sign."""
        if not isinstance(low, int):
            return super().ranked(x, low, high)
        ordered = np.sort(x, axis=-1) if x.dtype == object else np.partition(x, (low, high), axis=-1)
        first, second = (ordered[..., rank : rank + 1] for rank in (low, high))
        return np.where(first == 0, np.abs(first), first), np.where(second == 0, np.abs(second), second)


FUNCTIONS = NumpyFunctions(np)

#: The matrix functions.
NUMPY_MATRIX = matrix_functions(FUNCTIONS)


class NumpyLibrary(Library):
    """NumPy, on memory of its own or shared with it. All numbers are known at once."""

    of: Functions = FUNCTIONS
    arithmetic: Mapping[Op, Callable[..., Any]] = {**NUMPY, Op.CHANCE: partial(bits.chance, np)}
    matrix: Mapping[Op, Callable[..., Any]] = NUMPY_MATRIX

    def write(self, array: Any, values: Array) -> None:
        array[...] = values.reshape(array.shape)

    def handed(self, values: Array, dtype: str, copied: bool) -> Any:
        """The same array where it meets the demands."""
        return np.array(values, dtype, order="C", copy=True if copied else None)

    def copy(self, values: Any) -> Array:
        return np.array(values)

    def at(self, values: Any, i: int) -> Any:
        """A Python number."""
        number = values if np.ndim(values) == 0 else values[i]
        return bool(number) if np.asarray(number).dtype.kind == "b" else float(number)

    def put(self, into: Any, places: Array | slice, values: Any) -> None:
        into[places] = values

    def together(self, numbers: Sequence[Any]) -> Array:
        return np.array([x.reshape(-1)[0] for x in numbers], np.float64)

    def reduce(self, op: Op, values: Any, axes: tuple[int, ...] | None = None) -> Array:
        """Reduces in float64; sums are NumPy's pairwise ones."""
        start, ufunc = REDUCTIONS[op].nothing, REDUCTIONS[op].ufunc
        kept = axes is not None
        return cast(Array, ufunc.reduce(values, axis=axes, keepdims=kept, initial=start, dtype=np.float64))

    def random(self, op: Op, count: int, position: Mapping[str, Any], block: int = 0) -> Array:
        """Draws the numbers that the definition of the stream gives."""
        where = {"block": block, **{name: int(x) for name, x in position.items()}}
        return random.normal(count, **where) if op is Op.NORMAL else random.uniform(random.stream(count, **where))
