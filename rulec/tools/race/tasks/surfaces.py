"""The tasks `rosenbrock`, `rastrigin` and `valley`: functions of two numbers, in float64, without data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rulec.tools.display.path import RASTRIGIN, ROSENBROCK, Surface, valley
from rulec.tools.race.task import Stack

Array = np.ndarray[Any, Any]


class SurfaceTask:
    """A function of two numbers. Seed 0 begins at its own start, other seeds near it."""

    tags = {"point": frozenset({"depth=0"})}  # noqa: RUF012

    def __init__(self, name: str, steps: int, surface: Surface) -> None:
        self.name, self.steps, self._surface = name, steps, surface

    def initial(self, seed: int) -> dict[str, Array]:
        """The point of a seed."""
        away = 0.3 * np.random.default_rng(seed).normal(size=2) if seed else np.zeros(2)
        return {"point": np.array(self._surface.start) + away}

    def gradients(self, params: Stack, step: int, seeds: Sequence[int]) -> tuple[Array, Stack]:
        """The function and its gradient, the same at every step."""
        points = params["point"]
        return self._surface.value(points), {"point": self._surface.gradient(points)}

    def measures(self, params: Stack, seeds: Sequence[int]) -> dict[str, Array]:
        """The distance to the minimum."""
        return {"distance": np.linalg.norm(params["point"] - np.array(self._surface.minimum), axis=-1)}


def rosenbrock() -> SurfaceTask:
    """Rosenbrock's function, whose minimum at (1, 1) lies in a bent valley."""
    return SurfaceTask("rosenbrock", 1000, ROSENBROCK)


def rastrigin() -> SurfaceTask:
    """Rastrigin's function, with a minimum near every pair of whole numbers; the lowest is at (0, 0)."""
    return SurfaceTask("rastrigin", 500, RASTRIGIN)


def narrow_valley() -> SurfaceTask:
    """A straight valley, 1,000 times as steep across as along, with its minimum at (0, 0)."""
    return SurfaceTask("valley", 500, valley(1000.0, ROSENBROCK.start))
