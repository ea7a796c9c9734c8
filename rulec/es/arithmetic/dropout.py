"""Members that drop inputs: each sees a window of a ring of inputs, and the rest is not computed."""

from __future__ import annotations

from typing import Any

from rulec.es.arithmetic.draws import Draws
from rulec.es.arithmetic.family import Apply, Family
from rulec.es.perturbation import Perturbation
from rulec.es.streams import DROPPED, SHARED


class Dropout(Family):
    """A window of a ring of inputs is kept; the rest is not computed. The noise is what inputs are multiplied by."""

    def __init__(self, perturbation: Perturbation, shape: tuple[int, ...], draws: Draws) -> None:
        super().__init__(perturbation, shape, draws)
        self.kept = perturbation.kept_of(self.columns)

    def _start(self, direction: Any) -> Any:
        return direction * self.columns // self.perturbation.directions

    def _ring(self) -> Any:
        return self.draws.order(SHARED, DROPPED, self.columns)

    def _gains(self, direction: Any) -> Any:
        """What inputs are multiplied by, less 1."""
        place = self.xp.argsort(self._ring())
        inside = (place - self._start(direction)) % self.columns < self.kept
        return self.xp.where(inside, self.columns / self.kept - 1.0, -1.0).astype(self.draws.dtype)

    def dense(self, direction: Any) -> Any:
        return self.xp.broadcast_to(self._gains(direction)[:, None], self.shape)

    def change(self, noise: Any, weight: Any) -> Any:
        """A part of the weight."""
        return noise * weight

    def product(self, x: Any, weight: Any, apply: Apply) -> Any:
        ring = self._ring()
        scaled = self.xp.take(weight, ring, axis=-2) * self.xp.asarray(self.columns / self.kept, weight.dtype)

        def one(direction: Any, rows: Any) -> Any:
            halves = []
            for number, half in enumerate(self.xp.split(rows, self.perturbation.signs)):
                places = (self._start(direction) + number * self.kept + self.xp.arange(self.kept)) % self.columns
                halves.append(apply(self.xp.take(half, places, axis=-1), self.xp.take(scaled, places, axis=-2)))
            return self.xp.concatenate(halves)

        return self.each(one, self.xp.take(x, ring, axis=-1))

    def estimate(self, weights: Any, weight: Any) -> Any:
        """The gradient's part along the gains of inputs: dropout sees no other part of it."""
        gains = self.draws.product(weights[None], self.draws.batched(self._gains, self.directions))[0]
        weight = weight.astype(self.draws.dtype)
        others = (*range(len(self.window)), weight.ndim - 1)
        squares = self.xp.sum(weight * weight, axis=others) * (self.columns / self.kept - 1.0)
        there = squares > 0
        scale = self.xp.where(there, gains / self.xp.where(there, squares, 1.0), 0.0)
        return scale[:, None].astype(weight.dtype) * weight
