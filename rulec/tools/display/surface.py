"""Functions of two numbers that rules are shown and raced on, with their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Points: float64 of shape (..., 2).
Points = np.ndarray[Any, np.dtype[np.float64]]

#: Curvature across the valley that is drawn; along it the curvature is 1.
STEEP = 50.0
#: The angle of the valley, in radians.
ANGLE = math.pi / 6


@dataclass(frozen=True)
class Surface:
    """A function of two numbers: `value` of shape (...) and `gradient` of shape (..., 2) at points (..., 2).

    `start` is the beginning of paths on it, `minimum` its lowest point, where the value is 0.
    """

    name: str
    start: tuple[float, float]
    minimum: tuple[float, float]
    value: Callable[[Points], Points]
    gradient: Callable[[Points], Points]


def _rosenbrock(points: Points) -> Points:
    x, y = points[..., 0], points[..., 1]
    return np.asarray(100 * (y - x * x) ** 2 + (1 - x) ** 2)


def _rosenbrock_gradient(points: Points) -> Points:
    x, y = points[..., 0], points[..., 1]
    bend = y - x * x
    return np.stack([-400 * bend * x - 2 * (1 - x), 200 * bend], axis=-1)


def _rastrigin(points: Points) -> Points:
    return np.asarray((points**2 - 10 * np.cos(2 * np.pi * points) + 10).sum(axis=-1))


def _rastrigin_gradient(points: Points) -> Points:
    return 2 * points + 20 * np.pi * np.sin(2 * np.pi * points)


_AXES = np.array([[math.sqrt(3) / 2, 0.5], [-0.5, math.sqrt(3) / 2]])


def valley(steep: float, start: tuple[float, float]) -> Surface:
    """`(u**2 + steep*v**2)/2` in axes turned by 30 degrees."""
    curvature = np.array([1.0, steep])

    def turned(points: Points) -> Points:
        return np.asarray((_AXES * points[..., None, :]).sum(axis=-1))

    def value(points: Points) -> Points:
        return np.asarray(0.5 * (curvature * turned(points) ** 2).sum(axis=-1))

    def gradient(points: Points) -> Points:
        return np.asarray((_AXES * (curvature * turned(points))[..., None]).sum(axis=-2))

    return Surface("A narrow valley", start, (0.0, 0.0), value, gradient)


ROSENBROCK = Surface("Rosenbrock's function", (-1.2, 1.0), (1.0, 1.0), _rosenbrock, _rosenbrock_gradient)
RASTRIGIN = Surface("Rastrigin's function", (-3.3, 2.4), (0.0, 0.0), _rastrigin, _rastrigin_gradient)
VALLEY = valley(STEEP, (-1.6, -0.2))
