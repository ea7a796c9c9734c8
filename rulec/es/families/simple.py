"""One noise for all directions, which differ by the signs of its rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rulec.es.families.base import Apply, SharedNoise, along
from rulec.es.streams import COLUMNS, ROWS


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
