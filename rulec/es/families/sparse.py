"""Noise of its own for each element of a few inputs, which differ between directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rulec.es.families.base import Apply, SecondProduct
from rulec.es.streams import COLUMNS


class Sparse(SecondProduct):
    """Noise of some columns of each direction; the others have none."""

    def chosen(self, directions: Sequence[Any]) -> Any:
        """The columns of each direction, (directions, wide)."""
        return self.lines("orders", directions, COLUMNS)[:, : self.wide]

    def _parts(self, direction: Any) -> tuple[Any, Any]:
        """The columns, and their noise (rows, wide, *window)."""
        return self.chosen([direction])[0], self.drawn(direction, self.rows, self.wide)

    def dense(self, direction: Any) -> Any:
        """Zero but for the chosen columns."""
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
