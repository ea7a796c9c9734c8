"""The path of a rule on test functions of two numbers, with the functions and their gradients.

Rules are shown and raced on these functions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.array import Optimizer
from rulec.compiler.routing import route
from rulec.errors import RulecError
from rulec.language.rule import Rule

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


STEPS = 100
#: Learning rates that are tried.
RATES = (0.001, 0.01, 0.1, 1.0)

#: The functions that paths are drawn on.
FUNCTIONS = (ROSENBROCK, VALLEY)

Vector = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Path:
    """The points of a path, the learning rate (None where the rule has none), and the last value."""

    points: Vector
    rate: float | None
    value: float


def refusal(rule: Rule) -> str:
    """Why no path of the rule is drawn, as a sentence; empty where one is."""
    if rule.inputs:
        return f"The rule reads {', '.join(rule.inputs)} besides the gradient."
    if rule.standalone().moves:
        return "The rule evaluates the model several times in a step."
    if rule.analysis.matrices:
        return "The rule computes with matrices, and a path has two numbers."
    if rule.applies_to is not None and route(rule, (2,), set()).name != route(rule, (64, 64), set()).name:
        return "The rule gives vectors to another rule, and a path has two numbers."
    return ""


def paths(rule: Rule) -> list[Path]:
    """The path on each function, at the learning rate with the lowest last value. RulecError where none is finite."""
    rates: tuple[float | None, ...] = RATES if "lr" in rule.settings else (None,)
    runs = [_at(rule, rate) for rate in rates]
    best = [min(choices, key=lambda path: path.value) for choices in zip(*runs, strict=True)]
    if not all(math.isfinite(path.value) for path in best):
        raise RulecError("No learning rate that was tried leads to a finite value.")
    return best


def _at(rule: Rule, rate: float | None) -> list[Path]:
    return paths_with(rule, {} if rate is None else {"lr": rate})


def paths_with(rule: Rule, hyper: Mapping[str, float], functions: tuple[Surface, ...] = FUNCTIONS) -> list[Path]:
    """The path on each function with these hyper-parameters; RulecError for one out of its range."""
    if rule.analysis.scope in ("elementwise", "tensor"):
        return _run(rule, functions, hyper)
    return [path for function in functions for path in _run(rule, (function,), hyper)]  # one tensor sees the others


def statistics_with(rule: Rule, hyper: Mapping[str, float], function: Surface) -> dict[str, Vector]:
    """The statistics that a rule declares, in each step of its path; the mean of several values, NaN for none."""
    measured = {name: np.full(STEPS, np.nan) for name in rule.statistics}

    def note(step: int, optimizer: Optimizer) -> None:
        for name, places in optimizer.statistics().items():
            measured[name][step - 1] = np.concatenate([np.ravel(value) for value in places.values()]).mean()

    if measured:
        _run(rule, (function,), hyper, [*measured], note)
    return measured


def _run(
    rule: Rule, functions: tuple[Surface, ...], hyper: Mapping[str, float], watch: Sequence[str] = (),
    note: Callable[[int, Optimizer], None] = lambda step, optimizer: None,
) -> list[Path]:  # fmt: skip
    """The paths; `note` is called after each step, with the optimizer that measures the statistics in `watch`."""
    weights = [np.array(function.start) for function in functions]
    values: dict[str, Any] = dict(hyper)
    optimizer = Optimizer(rule, weights, backend="numpy", watch=watch or None, **values)
    track = np.empty((STEPS + 1, len(functions), 2))
    track[0] = weights
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):  # of skipped steps
        for step in range(1, STEPS + 1):
            optimizer.step([f.gradient(w) for f, w in zip(functions, weights, strict=True)])
            track[step] = weights
            note(step, optimizer)
        last = [_finite(float(f.value(w))) for f, w in zip(functions, weights, strict=True)]
    return [Path(track[:, place], hyper.get("lr"), value) for place, value in enumerate(last)]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf
