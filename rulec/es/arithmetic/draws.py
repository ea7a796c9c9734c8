"""The random numbers of a layer, and operations whose form differs between libraries of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Draws(Protocol):
    """The random numbers of one layer in one step as arrays of one library, and operations that differ by library.

    Directions may be traced; counts and shapes may not.
    """

    @property
    def xp(self) -> Any:
        """The library's functions, by NumPy's names."""

    @property
    def dtype(self) -> Any:
        """The dtype of noise and of its sums."""

    def values(self, direction: Any, purpose: int, shape: tuple[int, ...]) -> Any:
        """Noise of mean 0 and variance 1, of `dtype`."""

    def signs(self, direction: Any, purpose: int, count: int) -> Any:
        """1 or -1 for each line, of `dtype`."""

    def order(self, direction: Any, purpose: int, count: int) -> Any:
        """An order of lines."""

    def batched(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """The function's results on each of the arrays' first dimension, stacked."""

    def one_by_one(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """The same, with the memory of one at a time."""

    def summed(self, weights: Any, shape: tuple[int, ...]) -> Any:
        """The sum over directions, in order, of weights times values that are each direction's own."""

    def fold(self, function: Callable[..., Any], start: Any, *arrays: Any) -> Any:
        """`start`, to which `function(so_far, *each)` is applied along the arrays' first dimension, in order."""

    def added_at(self, array: Any, place: Any, values: Any) -> Any:
        """The array with values added at the places, which differ, of its last dimension but one."""

    def summed_at(self, size: int, place: Any, values: Any) -> Any:
        """A vector with values summed at places, of which some may be equal."""

    def product(self, a: Any, b: Any) -> Any:
        """A product of matrices of full precision."""
