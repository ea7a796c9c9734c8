"""Members that drop inputs: each sees a window of a ring of inputs, and the rest is not computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rulec.es.families.base import Apply, Family
from rulec.es.perturbation import Perturbation
from rulec.es.streams import DROPPED, SHARED


class Dropout(Family):
    """A window of a ring of inputs is kept, scaled so that their mean stays; the other sign has the rest.

    The noise is what inputs are multiplied by, less 1.
    """

    def __init__(self, perturbation: Perturbation, shape: tuple[int, ...], draws: Any) -> None:
        super().__init__(perturbation, shape, draws)
        self.kept_inputs = perturbation.kept_of(self.columns)

    def ring(self) -> Any:
        """The inputs in this step's order."""
        return self.draws.orders([SHARED], DROPPED, self.columns)[0]

    def place(self) -> Any:
        """The place of each input in the ring."""
        return self.xp.argsort(self.ring())

    def start(self, direction: Any) -> Any:
        """Where a direction's window begins in the ring, in its first sign."""
        return window_start(direction, len(self.directions), self.columns)

    def gains(self, directions: Sequence[Any]) -> Any:
        """What inputs are multiplied by, less 1: (directions, columns)."""
        starts = self.start(self.draws.numbers(directions))
        inside = (self.place() - starts[:, None]) % self.columns < self.kept_inputs
        return self.draws.cast(inside) * (self.columns / self.kept_inputs) - 1.0

    def dense(self, direction: Any) -> Any:
        """The gains of inputs, less 1."""
        gains = self.spread(self.gains([direction]))
        return self.draws.laid(self.xp.broadcast_to(gains, (self.rows, self.columns, *self.window)))

    def change(self, noise: Any, weight: Any) -> Any:
        """A part of the weight."""
        return noise * weight

    def product(self, x: Any, weight: Any, apply: Apply) -> Any:
        ring = self.ring()
        scaled = self.xp.take(weight, ring, axis=-2) * self.xp.asarray(self.columns / self.kept_inputs, weight.dtype)

        def one(direction: Any, rows: Any) -> Any:
            halves = []
            for number, half in enumerate(self.xp.split(rows, self.perturbation.signs)):
                first = self.start(direction) + number * self.kept_inputs
                places = (first + self.xp.arange(self.kept_inputs)) % self.columns
                halves.append(apply(self.xp.take(half, places, axis=-1), self.xp.take(scaled, places, axis=-2)))
            return self.xp.concatenate(halves)

        return self.each(one, self.xp.take(x, ring, axis=-1))

    def summed(self, weights: Any, weight: Any) -> Any:
        """The gradient's part along the gains of inputs: dropout sees no other part of it."""
        gains = self.draws.product(weights, self.gains(self.directions))
        weight = self.draws.cast(weight)
        others = [axis for axis in range(weight.ndim) if axis != self.draws.axis % weight.ndim]
        squares = (weight * weight).sum(axis=tuple(others)) * (self.columns / self.kept_inputs - 1.0)
        scale = self.xp.where(squares > 0, gains / self.xp.where(squares > 0, squares, 1.0), 0.0)
        return self.draws.laid(self.spread(scale[None])) * weight


def window_start(direction: Any, directions: int, columns: int) -> Any:
    """Where the window of one of so many directions begins in a ring of so many inputs, in its first sign."""
    return direction * columns // directions
