"""The base of the families of noise: the operations of a family on the noise of one weight in one step.

The random numbers of a layer are here, and operations whose form differs between array libraries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rulec.es.perturbation import Perturbation
from rulec.es.streams import NOISE, ROWS, SHARED

#: A linear map of rows (n, ..., inputs) by a kernel (*window, inputs, outputs), such as a product or a convolution.
Apply = Callable[[Any, Any], Any]


class Family(ABC):
    """The noise of a weight of `shape`, drawn from `draws`; its rows are outputs.

    `product`, `taken` and `vectors` are for weights that lie as (*window, inputs, outputs).
    """

    def __init__(self, perturbation: Perturbation, shape: tuple[int, ...], draws: Any) -> None:
        self.perturbation, self.shape, self.xp = perturbation, shape, draws.xp
        self.draws: Draws = draws
        #: What noise is multiplied by.
        self.size: Any = perturbation.size
        self.rows, self.columns, self.window = draws.sides(shape)
        #: How many rows and columns of noise a direction has.
        self.high, self.wide = perturbation.lines_of(self.rows, self.columns)
        #: The numbers of all directions.
        self.directions = range(perturbation.directions)

    @abstractmethod
    def dense(self, direction: Any) -> Any:
        """The noise of a direction, in the weight's shape, before sigma."""

    @abstractmethod
    def product(self, x: Any, weight: Any, apply: Apply) -> Any:
        """Rows (repeats, directions, ..., inputs) times the perturbed weights of their members: (..., outputs)."""

    def estimate(self, weights: Any, weight: Any) -> Any:
        """The sum over directions of weights times noise, in the weight's shape and the dtype of noise."""
        return self.summed(self.draws.weights(weights), weight)

    @abstractmethod
    def summed(self, weights: Any, weight: Any) -> Any:
        """The same, of weights as `draws` has them."""

    def change(self, noise: Any, weight: Any) -> Any:
        """What noise adds to weights under the positive sign."""
        return noise * self.size

    def taken(self, indices: Any, weight: Any) -> Any:
        """Lines of a perturbed table (inputs, outputs) at indices (repeats, directions, ...): (..., outputs)."""

        noise = self.each(lambda direction, places: self.xp.take(self.dense(direction), places, axis=0), indices)
        lines = self.xp.take(weight, indices, axis=0)
        return lines + self.by_sign(indices.shape[0], noise).astype(lines.dtype) * self.change(noise, lines)

    def vectors(self, weight: Any, repeats: int) -> Any:
        """A vector as the member of each row has it, in its dtype: (repeats, directions, elements)."""
        noise = self.draws.values(self.directions, NOISE, self.shape)[None]
        step = self.by_sign(repeats, noise) * self.size * noise
        return (weight + step).astype(weight.dtype)

    def each(self, function: Callable[..., Any], x: Any) -> Any:
        """`function(direction, its rows)` of rows (repeats, directions, ...), with the memory of one at a time."""
        rows = self.xp.moveaxis(x, 1, 0)
        return self.xp.moveaxis(self.draws.one_by_one(function, self.directions, rows), 0, 1)

    def by_sign(self, repeats: int, like: Any) -> Any:
        """The sign of each repeat, to be multiplied with an array of as many dimensions as `like`."""
        positive = self.xp.arange(repeats) < repeats // self.perturbation.signs
        return self.xp.where(positive, 1.0, -1.0).reshape(-1, *(1,) * (like.ndim - 1))

    def drawn(self, direction: Any, rows: int, columns: int) -> Any:
        """Noise of so many lines, (rows, columns, *window), scaled for a variance of 1 over all lines."""
        noise = self.draws.values([direction], NOISE, (rows, columns, *self.window))[0]
        return noise * self.perturbation.scale_of(self.rows, self.columns)

    def lines(self, of: str, directions: Sequence[Any], purpose: int) -> Any:
        """The `signs` or `orders` of rows or columns for some directions: (directions, lines)."""
        return getattr(self.draws, of)(directions, purpose, self.rows if purpose == ROWS else self.columns)

    def spread(self, lines: Any) -> Any:
        """Lines (rows or 1, columns or 1) as they meet noise (rows, columns, *window)."""
        return lines.reshape(*lines.shape, *(1,) * len(self.window))


class SecondProduct(Family):
    """Noise with a product of its own, beside the product of all rows with the weight."""

    @abstractmethod
    def moved(self, x: Any, apply: Apply) -> Any:
        """Rows (repeats, directions, ..., inputs) times the noise of their directions."""

    def product(self, x: Any, weight: Any, apply: Apply) -> Any:
        """The sum of both products."""
        moved = self.moved(x, apply)
        scale = self.by_sign(x.shape[0], moved) * self.size
        return self.together(x, weight, apply) + scale.astype(moved.dtype) * moved

    def together(self, x: Any, kernel: Any, apply: Apply) -> Any:
        """All rows times one kernel."""
        outputs = apply(x.reshape(-1, *x.shape[2:]), kernel)
        return outputs.reshape(*x.shape[:2], *outputs.shape[1:])


def along(lines: Any, x: Any) -> Any:
    """Lines of each direction, (directions, n), to meet the last dimension of rows."""
    return lines.reshape(1, lines.shape[0], *(1,) * (x.ndim - 3), lines.shape[1])


class SharedNoise(SecondProduct):
    """One noise for all directions, with differences in the rows (`by_rows`), the columns (`by_columns`) or both."""

    def __init__(self, perturbation: Perturbation, shape: tuple[int, ...], draws: Any) -> None:
        super().__init__(perturbation, shape, draws)
        self.by_rows, self.by_columns = perturbation.sides_of(self.rows, self.columns)

    def shared(self) -> Any:
        """The noise of all directions, of the lines that it has: (high, wide, *window)."""
        return self.drawn(SHARED, self.high, self.wide)


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
