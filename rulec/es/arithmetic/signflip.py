"""One noise for all directions, which differ by the signs of its inputs and outputs."""

from __future__ import annotations

from typing import Any

from rulec.es.arithmetic.family import Apply, SharedNoise, along
from rulec.es.streams import COLUMNS, ROWS, SHARED


class SignFlip(SharedNoise):
    """One kernel of noise, with signs of inputs and outputs of each direction's own."""

    @property
    def shared(self) -> Any:
        """The noise of all directions."""
        return self.drawn(SHARED, self.rows, self.columns)

    def dense(self, direction: Any) -> Any:
        noise = self.shared
        if self.by_rows:
            noise = noise * self.draws.signs(direction, ROWS, self.rows)
        if self.by_columns:
            noise = noise * self.draws.signs(direction, COLUMNS, self.columns)[:, None]
        return noise

    def moved(self, x: Any, apply: Apply) -> Any:
        x = x * along(self.lines(self.draws.signs, COLUMNS, self.columns), x) if self.by_columns else x
        moved = self.together(x, self.shared, apply)
        if not self.by_rows:
            return moved
        return moved * along(self.lines(self.draws.signs, ROWS, self.rows), moved)

    def estimate(self, weights: Any, weight: Any) -> Any:
        return self._factor(weights) * self.shared

    def _factor(self, weights: Any) -> Any:
        """The weighted sum of signs: by inputs and outputs, or the one or the other."""
        weighted = weights[None]
        if not self.by_columns:
            return self.draws.product(weighted, self.lines(self.draws.signs, ROWS, self.rows))
        columns = self.lines(self.draws.signs, COLUMNS, self.columns)
        if not self.by_rows:
            return self.draws.product(weighted, columns).T
        return self.draws.product((weighted * columns.T), self.lines(self.draws.signs, ROWS, self.rows))
