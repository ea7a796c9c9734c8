"""One noise for all directions, which differ by the order of its inputs and outputs, and without pairs by a sign."""

from __future__ import annotations

from typing import Any

from rulec.es.arithmetic.draws import Draws
from rulec.es.arithmetic.family import Apply, SharedNoise, along
from rulec.es.perturbation import Perturbation
from rulec.es.streams import COLUMNS, ROWS, SHARED, SIGNS


class Permuted(SharedNoise):
    """One kernel of noise, with inputs and outputs in an order of each direction's own, and without pairs a sign."""

    def __init__(self, perturbation: Perturbation, shape: tuple[int, ...], draws: Draws) -> None:
        super().__init__(perturbation, shape, draws)
        self.high, self.wide = perturbation.lines_of(self.rows, self.columns)

    @property
    def shared(self) -> Any:
        """The noise of all directions, of the lines that it has: (*window, wide, high)."""
        return self.drawn(SHARED, self.high, self.wide) * self.perturbation.scale_of(self.rows, self.columns)

    @property
    def whole(self) -> Any:
        """The same with zeros where it has no lines, in the weight's shape."""
        missing = (self.columns - self.wide, self.rows - self.high)
        return self.xp.pad(self.shared, [(0, 0)] * len(self.window) + [(0, count) for count in missing])

    @property
    def signs(self) -> Any:
        """A sign of each direction's own, (directions,)."""
        return self.draws.signs(SHARED, SIGNS, self.perturbation.directions)

    def dense(self, direction: Any) -> Any:
        noise = self._ordered(self.whole, direction)
        return noise if self.perturbation.antithetic else noise * self.signs[direction]

    def _ordered(self, noise: Any, direction: Any) -> Any:
        if self.by_rows:
            noise = self.xp.take(noise, self.draws.order(direction, ROWS, self.rows), axis=-1)
        if self.by_columns:
            noise = self.xp.take(noise, self.draws.order(direction, COLUMNS, self.columns), axis=-2)
        return noise

    def moved(self, x: Any, apply: Apply) -> Any:
        x = self._reaching(x) if self.by_columns else x
        moved = self.together(x, self.shared, apply)
        if not self.perturbation.antithetic:
            moved = moved * along(self.signs[:, None], moved)
        if not self.by_rows:
            return moved
        short = self.rows - self.high
        moved = self.xp.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, short)]) if short else moved
        order = self.lines(self.draws.order, ROWS, self.rows)
        return self.xp.take_along_axis(moved, along(order, moved), axis=-1)

    def _reaching(self, x: Any) -> Any:
        """The inputs that meet the lines of the shared noise, in their order."""
        places = self.xp.argsort(self.lines(self.draws.order, COLUMNS, self.columns), axis=-1)[:, : self.wide]
        return self.xp.take_along_axis(x, along(places, x), axis=-1)

    def estimate(self, weights: Any, weight: Any) -> Any:
        if not self.perturbation.antithetic:
            weights = weights * self.signs
        if self.by_rows and self.by_columns:
            whole = self.whole

            def add(total: Any, direction: Any, a: Any) -> Any:
                return total + a * self._ordered(whole, direction)

            return self.draws.fold(add, self.zeros(self.shape), self.directions, weights)
        if self.by_rows:
            mixed = self._mixed(weights, ROWS, self.rows)
            return self.draws.product(self.whole, mixed)
        mixed = self._mixed(weights, COLUMNS, self.columns)
        return self.draws.product(mixed.T, self.whole)

    def _mixed(self, weights: Any, purpose: int, count: int) -> Any:
        """The weighted sum of permutation matrices: what line i of the noise gives to line j, (i, j)."""
        order = self.lines(self.draws.order, purpose, count)
        place = order * count + self.xp.arange(count)
        terms = self.xp.broadcast_to(weights[:, None], place.shape)
        return self.draws.summed_at(count * count, place.reshape(-1), terms.reshape(-1)).reshape(count, count)
