"""What each family computes, once for NumPy, CuPy and JAX: noise, products with it, and its weighted sum.

A weight lies here as (*window, inputs, outputs): `x @ W`, and kernels of convolutions as HWIO. Its noise is that which
`rulec.es.dense` defines for a weight of (outputs, inputs, *window), transposed; only noise that is of its own for each
element is numbered as the weight lies in memory.

Rows of a batch are (repeats, directions, ..., inputs), the first half of the repeats of positive sign where antithetic.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from rulec.es.perturbation import Perturbation
from rulec.es.streams import COLUMNS, DROPPED, NOISE, ROWS, SHARED, SIGN

#: A linear map of rows (n, ..., inputs) by a kernel (*window, inputs, outputs), such as a product or a convolution.
Apply = Callable[[Any, Any], Any]


class Draws(Protocol):
    """The random numbers of one layer in one step as arrays of one library, and what libraries do in different ways.

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


class Family(ABC):
    """The noise of one weight in one step."""

    def __init__(self, perturbation: Perturbation, shape: tuple[int, ...], draws: Draws) -> None:
        self.perturbation, self.shape, self.draws, self.xp = perturbation, shape, draws, draws.xp
        *window, self.inputs, self.outputs = (1,) * (2 - len(shape)) + shape
        self.window = tuple(window)

    @property
    def directions(self) -> Any:
        """The numbers of all directions."""
        return self.xp.arange(self.perturbation.directions)

    @abstractmethod
    def dense(self, direction: Any) -> Any:
        """The noise of a direction, in the weight's shape."""

    @abstractmethod
    def moved(self, x: Any, apply: Apply) -> Any:
        """Rows (repeats, directions, ..., inputs) times the noise of their directions."""

    @abstractmethod
    def estimate(self, weights: Any, weight: Any) -> Any:
        """The sum over directions of weights times noise, in the weight's shape."""

    def product(self, x: Any, weight: Any, apply: Apply) -> Any:
        """Rows times the perturbed weights of their members: (repeats, directions, ..., outputs)."""
        moved = self.moved(x, apply)
        scale = by_sign(self.perturbation, x.shape[0], self.xp, moved) * self.perturbation.sigma
        return self.together(x, weight, apply) + scale.astype(moved.dtype) * moved

    def taken(self, indices: Any, weight: Any) -> Any:
        """Lines of a perturbed table (inputs, outputs) at indices (repeats, directions, ...): (..., outputs)."""

        def one(direction: Any, places: Any) -> Any:
            return self.xp.take(self.dense(direction), places, axis=0)

        found = self.draws.one_by_one(one, self.directions, self.xp.moveaxis(indices, 1, 0))
        noise, lines = self.xp.moveaxis(found, 0, 1), self.xp.take(weight, indices, axis=0)
        if self.perturbation.family == "dropout":
            return (
                lines + by_sign(self.perturbation, indices.shape[0], self.xp, noise).astype(lines.dtype) * noise * lines
            )
        step = by_sign(self.perturbation, indices.shape[0], self.xp, noise) * self.perturbation.sigma
        return lines + step.astype(lines.dtype) * noise

    def together(self, x: Any, kernel: Any, apply: Apply) -> Any:
        """All rows times one kernel."""
        found = apply(x.reshape(-1, *x.shape[2:]), kernel)
        return found.reshape(*x.shape[:2], *found.shape[1:])

    def drawn(self, direction: Any, rows: int, columns: int) -> Any:
        """Noise of (rows, columns, *window) as a kernel."""
        found = self.draws.values(direction, NOISE, (rows, columns, *self.window))
        return self.xp.transpose(found, (*range(2, 2 + len(self.window)), 1, 0))

    def lines(self, of: Callable[..., Any], purpose: int, count: int) -> Any:
        """Signs or orders of lines for every direction: (directions, count)."""
        return self.draws.batched(lambda direction: of(direction, purpose, count), self.directions)

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """Zeros of the noise's dtype."""
        return self.xp.zeros(shape, self.draws.dtype)


def by_sign(perturbation: Perturbation, repeats: int, xp: Any, like: Any) -> Any:
    """The sign of each repeat, to be multiplied with an array of as many dimensions as `like`."""
    positive = xp.arange(repeats) < repeats // perturbation.signs
    return xp.where(positive, 1.0, -1.0).reshape(-1, *(1,) * (like.ndim - 1))


def along(lines: Any, x: Any) -> Any:
    """Lines of each direction, (directions, n), to meet the last dimension of rows."""
    return lines.reshape(1, lines.shape[0], *(1,) * (x.ndim - 3), lines.shape[1])


class Independent(Family):
    """A number of its own for each element and direction: made for one direction at a time."""

    def dense(self, direction: Any) -> Any:
        return self.draws.values(direction, NOISE, self.shape)

    def moved(self, x: Any, apply: Apply) -> Any:
        return self._each(lambda rows, noise: apply(rows, noise), x)

    def product(self, x: Any, weight: Any, apply: Apply) -> Any:
        def both(rows: Any, noise: Any) -> Any:
            step = noise * self.perturbation.sigma
            halves = zip(self.xp.split(rows, self.perturbation.signs), (1, -1), strict=False)
            return self.xp.concatenate([apply(half, (weight + sign * step).astype(x.dtype)) for half, sign in halves])

        return self._each(both, x)

    def _each(self, function: Apply, x: Any) -> Any:
        rows = self.xp.moveaxis(x, 1, 0)
        found = self.draws.one_by_one(lambda d, own: function(own, self.dense(d)), self.directions, rows)
        return self.xp.moveaxis(found, 0, 1)

    def estimate(self, weights: Any, weight: Any) -> Any:
        return self.draws.summed(weights, self.shape)


class Sparse(Family):
    """A number of its own for each element of a few inputs, others for each direction."""

    @property
    def count(self) -> int:
        """How many inputs are perturbed."""
        return min(self.inputs, self.perturbation.sparsity or self.inputs)

    def _parts(self, direction: Any) -> tuple[Any, Any]:
        """The inputs, and the kernel of their noise."""
        chosen = self.draws.order(direction, COLUMNS, self.inputs)[: self.count]
        return chosen, self.drawn(direction, self.outputs, self.count) * math.sqrt(self.inputs / self.count)

    def dense(self, direction: Any) -> Any:
        return self.draws.added_at(self.zeros(self.shape), *self._parts(direction))

    def moved(self, x: Any, apply: Apply) -> Any:
        def one(direction: Any, rows: Any) -> Any:
            chosen, noise = self._parts(direction)
            return apply(self.xp.take(rows, chosen, axis=-1), noise)

        found = self.draws.one_by_one(one, self.directions, self.xp.moveaxis(x, 1, 0))
        return self.xp.moveaxis(found, 0, 1)

    def estimate(self, weights: Any, weight: Any) -> Any:
        def add(total: Any, direction: Any, a: Any) -> Any:
            chosen, noise = self._parts(direction)
            return self.draws.added_at(total, chosen, a * noise)

        return self.draws.fold(add, self.zeros(self.shape), self.directions, weights)


class Permuted(Family):
    """One kernel of noise, with inputs and outputs in an order of each direction's own, and without pairs a sign."""

    def __init__(self, perturbation: Perturbation, shape: tuple[int, ...], draws: Draws) -> None:
        super().__init__(perturbation, shape, draws)
        self.high, self.wide = perturbation.lines_of(self.outputs, self.inputs)
        self.by_rows, self.by_columns = perturbation.sides_of(self.outputs, self.inputs)

    @property
    def shared(self) -> Any:
        """The noise of all directions, of the lines that it has: (*window, wide, high)."""
        scale = math.sqrt(self.outputs / self.high * self.inputs / self.wide)
        return self.drawn(SHARED, self.high, self.wide) * scale

    @property
    def whole(self) -> Any:
        """The same with zeros where it has no lines, in the weight's shape."""
        missing = (self.inputs - self.wide, self.outputs - self.high)
        return self.xp.pad(self.shared, [(0, 0)] * len(self.window) + [(0, count) for count in missing])

    def dense(self, direction: Any) -> Any:
        found = self._ordered(self.whole, direction)
        return found if self.perturbation.antithetic else found * self.draws.signs(direction, SIGN, 1)

    def _ordered(self, found: Any, direction: Any) -> Any:
        if self.by_rows:
            found = self.xp.take(found, self.draws.order(direction, ROWS, self.outputs), axis=-1)
        if self.by_columns:
            found = self.xp.take(found, self.draws.order(direction, COLUMNS, self.inputs), axis=-2)
        return found

    def moved(self, x: Any, apply: Apply) -> Any:
        found = self.together(self._reaching(x), self.shared, apply)
        if not self.perturbation.antithetic:
            found = found * along(self.lines(self.draws.signs, SIGN, 1), found)
        short = self.outputs - self.high
        found = self.xp.pad(found, [(0, 0)] * (found.ndim - 1) + [(0, short)]) if short else found
        if not self.by_rows:
            return found
        order = self.lines(self.draws.order, ROWS, self.outputs)
        return self.xp.take_along_axis(found, along(order, found), axis=-1)

    def _reaching(self, x: Any) -> Any:
        """The inputs that meet the lines of the shared noise, in their order."""
        if not self.by_columns:
            return x[..., : self.wide]
        places = self.xp.argsort(self.lines(self.draws.order, COLUMNS, self.inputs), axis=-1)[:, : self.wide]
        return self.xp.take_along_axis(x, along(places, x), axis=-1)

    def estimate(self, weights: Any, weight: Any) -> Any:
        if not self.perturbation.antithetic:
            weights = weights * self.lines(self.draws.signs, SIGN, 1)[:, 0]
        if self.by_rows and self.by_columns:
            whole = self.whole

            def add(total: Any, direction: Any, a: Any) -> Any:
                return total + a * self._ordered(whole, direction)

            return self.draws.fold(add, self.zeros(self.shape), self.directions, weights)
        if self.by_rows:
            mixed = self._mixed(weights, ROWS, self.outputs)
            return self.draws.product(self.whole, mixed)
        mixed = self._mixed(weights, COLUMNS, self.inputs)
        return self.draws.product(mixed.T, self.whole)

    def _mixed(self, weights: Any, purpose: int, count: int) -> Any:
        """The weighted sum of permutation matrices: what line i of the noise gives to line j, (i, j)."""
        order = self.lines(self.draws.order, purpose, count)
        place = order * count + self.xp.arange(count)
        given = self.xp.broadcast_to(weights[:, None], place.shape)
        return self.draws.summed_at(count * count, place.reshape(-1), given.reshape(-1)).reshape(count, count)


class Signflip(Family):
    """One kernel of noise, with signs of inputs and outputs of each direction's own."""

    def __init__(self, perturbation: Perturbation, shape: tuple[int, ...], draws: Draws) -> None:
        super().__init__(perturbation, shape, draws)
        self.by_rows, self.by_columns = perturbation.sides_of(self.outputs, self.inputs)

    @property
    def shared(self) -> Any:
        """The noise of all directions."""
        return self.drawn(SHARED, self.outputs, self.inputs)

    def dense(self, direction: Any) -> Any:
        found = self.shared
        if self.by_rows:
            found = found * self.draws.signs(direction, ROWS, self.outputs)
        if self.by_columns:
            found = found * self.draws.signs(direction, COLUMNS, self.inputs)[:, None]
        return found

    def moved(self, x: Any, apply: Apply) -> Any:
        x = x * along(self.lines(self.draws.signs, COLUMNS, self.inputs), x) if self.by_columns else x
        found = self.together(x, self.shared, apply)
        if not self.by_rows:
            return found
        return found * along(self.lines(self.draws.signs, ROWS, self.outputs), found)

    def estimate(self, weights: Any, weight: Any) -> Any:
        return self._factor(weights) * self.shared

    def _factor(self, weights: Any) -> Any:
        """The weighted sum of signs: by inputs and outputs, or the one or the other."""
        weighted = weights[None]
        if not self.by_columns:
            return self.draws.product(weighted, self.lines(self.draws.signs, ROWS, self.outputs))
        columns = self.lines(self.draws.signs, COLUMNS, self.inputs)
        if not self.by_rows:
            return self.draws.product(weighted, columns).T
        return self.draws.product((weighted * columns.T), self.lines(self.draws.signs, ROWS, self.outputs))


class Lowrank(Family):
    """A product of two factors of each direction's own."""

    def _right(self, direction: Any) -> Any:
        """The factor of inputs, as a kernel of `rank` outputs."""
        rank = self.perturbation.rank
        found = self.draws.values(direction, COLUMNS, (rank, self.inputs, *self.window))
        return self.xp.transpose(found, (*range(2, 2 + len(self.window)), 1, 0))

    def _left(self, direction: Any) -> Any:
        """The factor of outputs, (rank, outputs), scaled for both."""
        rank = self.perturbation.rank
        return self.draws.values(direction, ROWS, (rank, self.outputs)) / math.sqrt(rank)

    def dense(self, direction: Any) -> Any:
        return self.draws.product(self._right(direction), self._left(direction))

    def moved(self, x: Any, apply: Apply) -> Any:
        def one(direction: Any, rows: Any) -> Any:
            return apply(rows, self._right(direction)) @ self._left(direction)

        return self.xp.moveaxis(self.draws.batched(one, self.directions, self.xp.moveaxis(x, 1, 0)), 0, 1)

    def estimate(self, weights: Any, weight: Any) -> Any:
        right = self.draws.batched(self._right, self.directions)
        left = self.draws.batched(self._left, self.directions) * weights[:, None, None]
        right = self.xp.moveaxis(right, 0, -2).reshape(*self.window, self.inputs, -1)
        return self.draws.product(right, left.reshape(-1, self.outputs))


class Dropout(Family):
    """A window of a ring of inputs is kept; the rest is not computed. The noise is what inputs are multiplied by."""

    def __init__(self, perturbation: Perturbation, shape: tuple[int, ...], draws: Draws) -> None:
        super().__init__(perturbation, shape, draws)
        self.kept = perturbation.kept_of(self.inputs)

    def _start(self, direction: Any) -> Any:
        return direction * self.inputs // self.perturbation.directions

    def _ring(self) -> Any:
        return self.draws.order(SHARED, DROPPED, self.inputs)

    def _gains(self, direction: Any) -> Any:
        """What inputs are multiplied by, less 1."""
        place = self.xp.argsort(self._ring())
        inside = (place - self._start(direction)) % self.inputs < self.kept
        return self.xp.where(inside, self.inputs / self.kept - 1.0, -1.0).astype(self.draws.dtype)

    def dense(self, direction: Any) -> Any:
        return self.xp.broadcast_to(self._gains(direction)[:, None], self.shape)

    def moved(self, x: Any, apply: Apply) -> Any:
        raise NotImplementedError

    def product(self, x: Any, weight: Any, apply: Apply) -> Any:
        ring = self._ring()
        scaled = self.xp.take(weight, ring, axis=-2) * self.xp.asarray(self.inputs / self.kept, weight.dtype)
        rows = self.xp.moveaxis(self.xp.take(x, ring, axis=-1), 1, 0)

        def one(direction: Any, own: Any) -> Any:
            found = []
            for number, half in enumerate(self.xp.split(own, self.perturbation.signs)):
                places = (self._start(direction) + number * self.kept + self.xp.arange(self.kept)) % self.inputs
                found.append(apply(self.xp.take(half, places, axis=-1), self.xp.take(scaled, places, axis=-2)))
            return self.xp.concatenate(found)

        return self.xp.moveaxis(self.draws.one_by_one(one, self.directions, rows), 0, 1)

    def estimate(self, weights: Any, weight: Any) -> Any:
        """The gradient's part along the gains of inputs, which is all that dropout can see of it."""
        gains = self.draws.product(weights[None], self.draws.batched(self._gains, self.directions))[0]
        weight = weight.astype(self.draws.dtype)
        others = (*range(len(self.window)), weight.ndim - 1)
        squares = self.xp.sum(weight * weight, axis=others) * (self.inputs / self.kept - 1.0)
        there = squares > 0
        scale = self.xp.where(there, gains / self.xp.where(there, squares, 1.0), 0.0)
        return scale[:, None].astype(weight.dtype) * weight


FAMILIES: dict[str, type[Family]] = {
    "independent": Independent, "spsa": Independent, "sparse": Sparse, "permuted": Permuted, "signflip": Signflip,
    "lowrank": Lowrank, "dropout": Dropout,
}  # fmt: skip


def family(perturbation: Perturbation, shape: tuple[int, ...], draws: Draws) -> Family:
    """The noise of a weight (*window, inputs, outputs); that of a vector is of its own for each element."""
    kind = FAMILIES[perturbation.family] if len(shape) > 1 else Independent
    return kind(perturbation, shape, draws)
