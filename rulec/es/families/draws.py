"""The random numbers of a layer, and operations whose form differs between libraries of arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any


class Draws(ABC):
    """The random numbers of one layer in one step as arrays of one library, and operations that differ by library.

    A dataclass with the library's functions `xp` by NumPy's names, the `kind` of noise, and the `dtype` of noise and
    its sums. Directions are a sequence of numbers, which may be traced; counts and shapes may not be. Noise is made as
    (rows, columns, *window). A weight lies as (*window, columns, rows), with columns at `axis`, unless a library has it
    another way.
    """

    xp: Any
    kind: Any
    dtype: Any
    axis = -2

    def sides(self, shape: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        """The rows, the columns and the window of a weight of this shape; a vector has one column."""
        *window, columns, rows = (1,) * (2 - len(shape)) + tuple(shape)
        return rows, columns, tuple(window)

    def laid(self, array: Any) -> Any:
        """An array (rows, columns, *window) as a weight lies."""
        return array.transpose((*range(2, array.ndim), 1, 0))

    def numbers(self, numbers: Sequence[Any]) -> Any:
        """Whole numbers as an array."""
        return self.xp.arange(len(numbers)) if isinstance(numbers, range) else self.xp.asarray(numbers)

    def cast(self, array: Any) -> Any:
        """An array in the dtype of noise."""
        return self.xp.asarray(array, self.dtype)

    def weights(self, weights: Any) -> Any:
        """The weights of directions, in the dtype of noise."""
        return self.cast(weights)

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """Zeros of the dtype of noise."""
        return self.xp.zeros(shape, self.dtype)

    def take(self, array: Any, places: Any, axis: int) -> Any:
        """Lines along an axis by number."""
        return self.xp.take(array, places, axis=axis)

    @abstractmethod
    def values(self, directions: Sequence[Any], purpose: int, shape: tuple[int, ...]) -> Any:
        """Noise of mean 0 and variance 1 for each direction: (directions, *shape)."""

    def signs(self, directions: Sequence[Any], purpose: int, count: int) -> Any:
        """1 or -1 for each direction and line: (directions, count)."""
        flips: Any = replace(self, kind="rademacher")  # type: ignore[type-var]  # every subclass is a dataclass
        return flips.values(directions, purpose, (count,))

    @abstractmethod
    def orders(self, directions: Sequence[Any], purpose: int, count: int) -> Any:
        """The order of lines that sorts their words, equal ones in their old order: (directions, count)."""

    @abstractmethod
    def summed(self, weights: Any, shape: tuple[int, ...]) -> Any:
        """The sum over directions, in order, of weights times values that are each direction's own."""

    @abstractmethod
    def added_at(self, array: Any, columns: Any, values: Any) -> Any:
        """The array with values added at columns, which differ; it may be written to."""

    @abstractmethod
    def summed_at(self, size: int, place: Any, values: Any) -> Any:
        """A vector with values summed at places, of which some may be equal."""

    def product(self, a: Any, b: Any) -> Any:
        """A product of matrices of full precision."""
        return self.xp.matmul(a, b)

    def batched(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """The function's results on each entry of the arrays' first dimension, stacked."""
        return self.xp.stack([function(*each) for each in zip(*arrays, strict=True)])

    def one_by_one(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """The same, with the memory of one at a time."""
        return self.batched(function, *arrays)

    def fold(self, function: Callable[..., Any], start: Any, *arrays: Any) -> Any:
        """`start`, to which `function(so_far, *each)` is applied along the arrays' first dimension, in order."""
        for each in zip(*arrays, strict=True):
            start = function(start, *each)
        return start
