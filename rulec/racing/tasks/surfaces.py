"""The tasks `rosenbrock` and `valley`: functions of two numbers, in float64, without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rulec.racing.task import Stack

Array = np.ndarray[Any, Any]


class Rosenbrock:
    """`100*(y - x**2)**2 + (1 - x)**2`, whose minimum is at (1, 1).

    Seed 0 begins at (-1.2, 1), as Rosenbrock did; other seeds begin near it.
    """

    name, steps = "rosenbrock", 1000
    tags: Mapping[str, frozenset[str]] = {}
    _minimum = (1.0, 1.0)

    def initial(self, seed: int) -> dict[str, Array]:
        """The point of a seed."""
        away = 0.3 * np.random.default_rng(seed).normal(size=2) if seed else np.zeros(2)
        return {"point": np.array([-1.2, 1.0]) + away}

    def gradients(self, params: Stack, step: int, seeds: Sequence[int]) -> tuple[Array, Stack]:
        """The function and its gradient, the same at every step."""
        x, y = np.moveaxis(params["point"], -1, 0)
        bend = y - x * x
        slope = np.stack([-400 * bend * x - 2 * (1 - x), 200 * bend], axis=-1)
        return 100 * bend**2 + (1 - x) ** 2, {"point": slope}

    def measures(self, params: Stack, seeds: Sequence[int]) -> dict[str, Array]:
        """The distance to the minimum."""
        return {"distance": np.linalg.norm(params["point"] - np.array(self._minimum), axis=-1)}


class Valley(Rosenbrock):
    """`(u**2 + 1000*v**2)/2` in axes turned by 30 degrees, with its minimum at (0, 0): a narrow straight valley."""

    name, steps = "valley", 500
    _minimum = (0.0, 0.0)
    _axes = np.array([[np.sqrt(3) / 2, 0.5], [-0.5, np.sqrt(3) / 2]])
    _curvature = np.array([1.0, 1000.0])

    def gradients(self, params: Stack, step: int, seeds: Sequence[int]) -> tuple[Array, Stack]:
        """The function and its gradient, the same at every step."""
        turned = (self._axes * params["point"][..., None, :]).sum(axis=-1)
        losses = 0.5 * (self._curvature * turned**2).sum(axis=-1)
        slope = (self._axes * (self._curvature * turned)[..., None]).sum(axis=-2)
        return losses, {"point": slope}
