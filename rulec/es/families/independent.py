"""Noise of its own for each element and direction."""

from __future__ import annotations

from typing import Any

from rulec.es.families.base import Apply, Family
from rulec.es.streams import NOISE


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
