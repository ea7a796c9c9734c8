"""Noise of its own for each element of a few inputs, which differ between directions."""

from __future__ import annotations

from typing import Any

from rulec.es.arithmetic.family import Apply, SecondProduct
from rulec.es.streams import COLUMNS


class Sparse(SecondProduct):
    """A number of its own for each element of a few inputs, others for each direction."""

    def _parts(self, direction: Any) -> tuple[Any, Any]:
        """The inputs, and the kernel of their noise."""
        _, count = self.perturbation.lines_of(self.rows, self.columns)
        chosen = self.draws.order(direction, COLUMNS, self.columns)[:count]
        noise = self.drawn(direction, self.rows, count) * self.perturbation.scale_of(self.rows, self.columns)
        return chosen, noise

    def dense(self, direction: Any) -> Any:
        return self.draws.added_at(self.zeros(self.shape), *self._parts(direction))

    def moved(self, x: Any, apply: Apply) -> Any:
        def one(direction: Any, rows: Any) -> Any:
            chosen, noise = self._parts(direction)
            return apply(self.xp.take(rows, chosen, axis=-1), noise)

        return self.each(one, x)

    def estimate(self, weights: Any, weight: Any) -> Any:
        def add(total: Any, direction: Any, a: Any) -> Any:
            chosen, noise = self._parts(direction)
            return self.draws.added_at(total, chosen, a * noise)

        return self.draws.fold(add, self.zeros(self.shape), self.directions, weights)
