"""One noise for all directions, which differ by the order of its rows and columns, and without pairs by a sign."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rulec.es.families.base import Apply, SharedNoise, along
from rulec.es.streams import COLUMNS, ROWS, SHARED, SIGNS


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
