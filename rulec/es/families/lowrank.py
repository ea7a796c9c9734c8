"""Noise of low rank: a product of two factors for each direction (Sarkar et al., EGGROLL, arXiv 2511.16652)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rulec.es.families.base import Apply, SecondProduct
from rulec.es.streams import COLUMNS, ROWS


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
