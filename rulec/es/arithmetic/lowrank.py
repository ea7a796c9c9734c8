"""Noise of low rank: a product of two factors for each direction (Sarkar et al., EGGROLL, arXiv 2511.16652)."""

from __future__ import annotations

import math
from typing import Any

from rulec.es.arithmetic.family import Apply, SecondProduct
from rulec.es.streams import COLUMNS, ROWS


class LowRank(SecondProduct):
    """A product of two factors of each direction's own."""

    def _right(self, direction: Any) -> Any:
        """The factor of inputs, as a kernel of `rank` outputs."""
        rank = self.perturbation.rank
        return self.as_kernel(self.draws.values(direction, COLUMNS, (rank, self.columns, *self.window)))

    def _left(self, direction: Any) -> Any:
        """The factor of outputs, (rank, outputs), scaled for both."""
        rank = self.perturbation.rank
        return self.draws.values(direction, ROWS, (rank, self.rows)) / math.sqrt(rank)

    def dense(self, direction: Any) -> Any:
        return self.draws.product(self._right(direction), self._left(direction))

    def moved(self, x: Any, apply: Apply) -> Any:
        def one(direction: Any, rows: Any) -> Any:
            return apply(rows, self._right(direction)) @ self._left(direction)

        return self.xp.moveaxis(self.draws.batched(one, self.directions, self.xp.moveaxis(x, 1, 0)), 0, 1)

    def estimate(self, weights: Any, weight: Any) -> Any:
        right = self.draws.batched(self._right, self.directions)
        left = self.draws.batched(self._left, self.directions) * weights[:, None, None]
        right = self.xp.moveaxis(right, 0, -2).reshape(*self.window, self.columns, -1)
        return self.draws.product(right, left.reshape(-1, self.rows))
