"""Trials that show what random numbers alone do not: norms of zero, and gradients with a common part."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.rules.measure import Trial
from tests.rules.runs import Array, Hyper


class SomeZero(Trial):
    """A trial that begins with one tensor of zeros, and three steps without a gradient for another."""

    @property
    def params(self) -> list[Array]:
        """The parameters at the start."""
        first, *others = super().params
        return [np.zeros_like(first), *others]

    def moves(self, hyper: Hyper) -> Iterator[tuple[list[Array], dict[str, float]]]:
        """Gradients and hyper-parameters of each step."""
        for k, (grads, now) in enumerate(super().moves(hyper)):
            if k < 3:
                grads[1][:] = 0
            yield grads, now


class Drifting(Trial):
    """A trial whose gradients have a common part: what measures the way from the start sees it grow."""

    def moves(self, hyper: Hyper) -> Iterator[tuple[list[Array], dict[str, float]]]:
        """Gradients and hyper-parameters of each step."""
        drift = [np.sign(p) for p in self.params]
        for grads, now in super().moves(hyper):
            yield [np.add(g, 2 * d, out=g) for g, d in zip(grads, drift, strict=True)], now
