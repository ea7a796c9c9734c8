"""The simple families of noise: flipped signs, independent, low rank, few inputs, permuted, and dropped inputs.

With signs, all directions share one noise, and differ by the signs of its rows and columns. Independent noise is drawn
for each element and direction. Noise of low rank is a product of two factors for each direction (Sarkar et al.,
EGGROLL, arXiv 2511.16652). Noise of few inputs is drawn for each element of these, and directions differ in the inputs.
Permuted noise is shared by all directions, which differ by the order of its rows and columns, and without pairs by a
sign. With dropped inputs each member sees a window of a ring of inputs, and the rest is not computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rulec.es.families.base import Apply, Family, SecondProduct, SharedNoise, along
from rulec.es.perturbation import Perturbation
from rulec.es.streams import COLUMNS, DROPPED, NOISE, ROWS, SHARED, SIGNS


class SignFlip(SharedNoise):
    """r_d E c_d: the product by E is one of all rows, and signs are flipped before and after it."""

    def dense(self, direction: Any) -> Any:
        """The one noise, with signs."""
        return self.draws.laid(self.shared() * self.signs([direction], self.draws.weights(np.ones(1))))

    def moved(self, x: Any, apply: Apply) -> Any:
        x = x * along(self.lines("signs", self.directions, COLUMNS), x) if self.by_columns else x
        moved = self.together(x, self.draws.laid(self.shared()), apply)
        return moved * along(self.lines("signs", self.directions, ROWS), moved) if self.by_rows else moved

    def summed(self, weights: Any, weight: Any) -> Any:
        """The one noise times the weighted sum of signs: a vector, or where both sides differ a matrix."""
        return self.draws.laid(self.shared() * self.signs(self.directions, weights))

    def signs(self, directions: Sequence[Any], weights: Any) -> Any:
        """The weighted sum of signs, as it meets the noise."""
        rows = self.lines("signs", directions, ROWS) if self.by_rows else None
        if not self.by_columns:
            return self.spread(self.draws.product(weights, rows)[:, None])
        columns = self.lines("signs", directions, COLUMNS)
        if rows is None:
            return self.spread(self.draws.product(weights, columns)[None])
        return self.spread(self.draws.product((rows * weights[:, None]).T, columns))


class Independent(Family):
    """A number of its own for each element and direction, numbered as the weight lies: one direction at a time."""

    def dense(self, direction: Any) -> Any:
        """One draw."""
        return self.draws.values([direction], NOISE, self.shape)[0]

    def product(self, x: Any, weight: Any, apply: Apply) -> Any:
        def both(direction: Any, rows: Any) -> Any:
            step = self.change(self.dense(direction), weight)
            halves = zip(self.xp.split(rows, self.perturbation.signs), (1, -1), strict=False)
            return self.xp.concatenate([apply(half, (weight + sign * step).astype(x.dtype)) for half, sign in halves])

        return self.each(both, x)

    def estimate(self, weights: Any, weight: Any) -> Any:
        """With weights as the kernels of noise round them."""
        return self.summed(weights, weight)

    def summed(self, weights: Any, weight: Any) -> Any:
        """One draw of the sum."""
        return self.draws.summed(weights, self.shape)


class LowRank(SecondProduct):
    """The sum over r of A_r B_r, over the root of the rank: `left` (directions, rank, rows), `right` (..., columns)."""

    def left(self, directions: Sequence[Any]) -> Any:
        """The factors of outputs, (directions, rank, rows)."""
        return self.factor(directions, ROWS, (self.rows,))

    def right(self, directions: Sequence[Any]) -> Any:
        """The factors of inputs, (directions, rank, columns, *window)."""
        return self.factor(directions, COLUMNS, (self.columns, *self.window))

    def factor(self, directions: Sequence[Any], purpose: int, shape: tuple[int, ...]) -> Any:
        """Each with the fourth root of the rank in it, so that their product is over its root."""
        rank = self.perturbation.rank
        return self.draws.values(directions, purpose, (rank, *shape)) / math.sqrt(math.sqrt(rank))

    def dense(self, direction: Any) -> Any:
        """One product of the factors."""
        return self._product(self.left([direction]), self.right([direction]))

    def moved(self, x: Any, apply: Apply) -> Any:
        def one(rows: Any, right: Any, left: Any) -> Any:
            return apply(rows, self.draws.laid(right)) @ left

        factors = self.right(self.directions), self.left(self.directions)
        return self.xp.moveaxis(self.draws.batched(one, self.xp.moveaxis(x, 1, 0), *factors), 0, 1)

    def summed(self, weights: Any, weight: Any) -> Any:
        """One product of all factors; both signs of a direction are one term of it."""
        return self._product(*self.factors(weights))

    def factors(self, weights: Any) -> tuple[Any, Any]:
        """The factors of the sum over directions."""
        return self.left(self.directions) * weights[:, None, None], self.right(self.directions)

    def _product(self, left: Any, right: Any) -> Any:
        product = self.draws.product(left.reshape(-1, self.rows).T, right.reshape(left.shape[0] * left.shape[1], -1))
        return self.draws.laid(product.reshape(self.rows, self.columns, *self.window))


class Sparse(SecondProduct):
    """Noise of some columns of each direction; the others have none."""

    def chosen(self, directions: Sequence[Any]) -> Any:
        """The columns of each direction, (directions, wide)."""
        return self.lines("orders", directions, COLUMNS)[:, : self.wide]

    def _parts(self, direction: Any) -> tuple[Any, Any]:
        """The columns, and their noise (rows, wide, *window)."""
        return self.chosen([direction])[0], self.drawn(direction, self.rows, self.wide)

    def dense(self, direction: Any) -> Any:
        """Zero except the chosen columns."""
        zeros = self.draws.zeros((self.rows, self.columns, *self.window))
        return self.draws.laid(self.draws.added_at(zeros, *self._parts(direction)))

    def moved(self, x: Any, apply: Apply) -> Any:
        def one(direction: Any, rows: Any) -> Any:
            chosen, noise = self._parts(direction)
            return apply(self.xp.take(rows, chosen, axis=-1), self.draws.laid(noise))

        return self.each(one, x)

    def summed(self, weights: Any, weight: Any) -> Any:
        """Direction by direction."""

        def add(total: Any, direction: Any, a: Any) -> Any:
            chosen, noise = self._parts(direction)
            return self.draws.added_at(total, chosen, a * noise)

        start = self.draws.zeros((self.rows, self.columns, *self.window))
        return self.draws.laid(self.draws.fold(add, start, self.directions, weights))


class Permuted(SharedNoise):
    """Row i of a direction is row `order[i]` of the noise, zero where there is none; so with columns."""

    def signs(self) -> Any:
        """A sign of each direction's own, (directions,); None of antithetic pairs, which have both."""
        count = len(self.directions)
        return None if self.perturbation.antithetic else self.draws.signs([SHARED], SIGNS, count)[0]

    def dense(self, direction: Any) -> Any:
        """The one noise, in the direction's order and with its sign."""
        noise, signs = self.draws.laid(self.ordered(direction)), self.signs()
        return noise if signs is None else noise * signs[direction]

    def ordered(self, direction: Any) -> Any:
        """The one noise in the direction's order: (rows, columns, *window)."""
        noise = self.shared()
        if self.by_rows:
            noise = self.draws.take(self.with_zero(noise, 0, self.rows), self.places([direction], ROWS)[0], 0)
        if self.by_columns:
            noise = self.draws.take(self.with_zero(noise, 1, self.columns), self.places([direction], COLUMNS)[0], 1)
        return noise

    def places(self, directions: Sequence[Any], purpose: int) -> Any:
        """The line of noise for each row or column; the line after the last where there is none."""
        return self.lines("orders", directions, purpose).clip(0, self.high if purpose == ROWS else self.wide)

    def with_zero(self, array: Any, axis: int, lines: int) -> Any:
        """The array with a line of zeros at the end of an axis, if it has fewer than `lines`."""
        if array.shape[axis] == lines:
            return array
        line = self.xp.moveaxis(self.xp.moveaxis(array, axis, 0)[:1], 0, axis)
        return self.xp.concatenate([array, self.xp.zeros_like(line)], axis)

    def moved(self, x: Any, apply: Apply) -> Any:
        x = self._reaching(x) if self.by_columns else x
        moved, signs = self.together(x, self.draws.laid(self.shared()), apply), self.signs()
        if signs is not None:
            moved = moved * along(signs[:, None], moved)
        if not self.by_rows:
            return moved
        places = self.places(self.directions, ROWS)
        return self.xp.take_along_axis(self.with_zero(moved, -1, self.rows), along(places, moved), axis=-1)

    def _reaching(self, x: Any) -> Any:
        """The inputs that meet the lines of the shared noise, in their order."""
        places = self.xp.argsort(self.lines("orders", self.directions, COLUMNS), axis=-1)[:, : self.wide]
        return self.xp.take_along_axis(x, along(places, x), axis=-1)

    def summed(self, weights: Any, weight: Any) -> Any:
        """The weighted sum of orders, as matrices, by the one noise; where both sides differ, term by term."""
        signed = self.signed(weights)
        if self.by_rows and self.by_columns:
            return self.draws.laid(self.terms(signed))
        noise = self.shared()
        if self.by_rows:
            total = self.draws.product(self.mixed(signed, ROWS), noise.reshape(self.high, -1))
            return self.draws.laid(total.reshape(self.rows, *noise.shape[1:]))
        total = self.draws.product(self.xp.moveaxis(noise, 1, -1), self.mixed(signed, COLUMNS).T)
        return self.draws.laid(self.xp.moveaxis(total, -1, 1))

    def signed(self, weights: Any) -> Any:
        """The weights of directions with their signs: what their orders are multiplied by."""
        signs = self.signs()
        return weights if signs is None else weights * signs

    def terms(self, weights: Any) -> Any:
        """The sum over directions of weights times noise, in order."""

        def add(total: Any, direction: Any, a: Any) -> Any:
            return total + a * self.ordered(direction)

        start = self.draws.zeros((self.rows, self.columns, *self.window))
        return self.draws.fold(add, start, self.directions, weights)

    def mixed(self, weights: Any, purpose: int) -> Any:
        """The weighted sum of orders as matrices: element (i, order[i]) is 1, for the lines that the noise has."""
        orders = self.lines("orders", self.directions, purpose)
        count = orders.shape[1]
        place = orders + self.draws.numbers(range(count)) * count
        terms = self.xp.broadcast_to(weights[:, None], place.shape)
        matrix = self.draws.summed_at(count * count, place.reshape(-1), terms.reshape(-1)).reshape(count, count)
        return matrix[:, : self.high if purpose == ROWS else self.wide]


class Dropout(Family):
    """A window of a ring of inputs is kept, scaled so that their mean stays; the other sign has the rest.

    The noise is what inputs are multiplied by, less 1.
    """

    def __init__(self, perturbation: Perturbation, shape: tuple[int, ...], draws: Any) -> None:
        super().__init__(perturbation, shape, draws)
        self.kept_inputs = perturbation.kept_of(self.columns)

    def ring(self) -> Any:
        """The inputs in this step's order."""
        return self.draws.orders([SHARED], DROPPED, self.columns)[0]

    def place(self) -> Any:
        """The place of each input in the ring."""
        return self.xp.argsort(self.ring())

    def start(self, direction: Any) -> Any:
        """Where a direction's window begins in the ring, in its first sign."""
        return window_start(direction, len(self.directions), self.columns)

    def gains(self, directions: Sequence[Any]) -> Any:
        """What inputs are multiplied by, less 1: (directions, columns)."""
        starts = self.start(self.draws.numbers(directions))
        inside = (self.place() - starts[:, None]) % self.columns < self.kept_inputs
        return self.draws.cast(inside) * (self.columns / self.kept_inputs) - 1.0

    def dense(self, direction: Any) -> Any:
        """The gains of inputs, less 1."""
        gains = self.spread(self.gains([direction]))
        return self.draws.laid(self.xp.broadcast_to(gains, (self.rows, self.columns, *self.window)))

    def change(self, noise: Any, weight: Any) -> Any:
        """A part of the weight."""
        return noise * weight

    def product(self, x: Any, weight: Any, apply: Apply) -> Any:
        ring = self.ring()
        scaled = self.xp.take(weight, ring, axis=-2) * self.xp.asarray(self.columns / self.kept_inputs, weight.dtype)

        def one(direction: Any, rows: Any) -> Any:
            halves = []
            for number, half in enumerate(self.xp.split(rows, self.perturbation.signs)):
                first = self.start(direction) + number * self.kept_inputs
                places = (first + self.xp.arange(self.kept_inputs)) % self.columns
                halves.append(apply(self.xp.take(half, places, axis=-1), self.xp.take(scaled, places, axis=-2)))
            return self.xp.concatenate(halves)

        return self.each(one, self.xp.take(x, ring, axis=-1))

    def summed(self, weights: Any, weight: Any) -> Any:
        """The gradient's part along the gains of inputs: dropout sees no other part of it."""
        gains = self.draws.product(weights, self.gains(self.directions))
        weight = self.draws.cast(weight)
        others = [axis for axis in range(weight.ndim) if axis != self.draws.axis % weight.ndim]
        squares = (weight * weight).sum(axis=tuple(others)) * (self.columns / self.kept_inputs - 1.0)
        scale = self.xp.where(squares > 0, gains / self.xp.where(squares > 0, squares, 1.0), 0.0)
        return self.draws.laid(self.spread(scale[None])) * weight


def window_start(direction: Any, directions: int, columns: int) -> Any:
    """Where the window of one of so many directions begins in a ring of so many inputs, in its first sign."""
    return direction * columns // directions
