"""The direction of L-BFGS beside the rule of the library, and searches beside optax's and Wolfe's conditions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rulec
from rulec.compiler.reference import ReferenceOptimizer
from rulec.runtime.lbfgs import SEARCHES, Progress
from rulec.runtime.line_search import Backtracking, Limits, Trial, floats, run, strong_wolfe

Vector = np.ndarray[Any, Any]
Function = Callable[[float], tuple[float, float]]
LIMITS = Limits(20, 1.0, 1e-9)


def add(vector: Vector, scale: Any, other: Vector) -> None:
    vector += scale * other


@pytest.mark.parametrize("memory", [1, 3])
def test_the_direction_is_that_of_the_rule(memory: int) -> None:
    start = np.random.default_rng(0).normal(size=6)
    rule = rulec.load(f"lbfgs_direction(memory={memory})")
    reference, progress, step = ReferenceOptimizer(rule, [start], {"lr": 0.5}), Progress(), 0.5
    for count in range(8):
        before = reference.params[0].astype(np.float64)
        gradient = np.logspace(0, 1.5, 6) * 2 * (before - 1) + 0.4 * before**3
        reference.step([gradient])
        progress.turn(gradient, 0.0, memory, add)
        progress.step = step
        moved = (reference.params[0].astype(np.float64) - before) / step
        if count == 0:  # the rule bounds the first step itself
            progress.direction = moved
        np.testing.assert_allclose(progress.direction, moved, rtol=1e-10)


def rosenbrock(x: Any) -> tuple[Any, Any]:
    """The value and the gradient; of NumPy or JAX."""
    bend = x[1] - x[0] * x[0]
    return 100 * bend * bend + (1 - x[0]) ** 2, [-400 * bend * x[0] - 2 * (1 - x[0]), 200 * bend]


@pytest.mark.peer
def test_backtracking_is_that_of_optax() -> None:
    with jax.enable_x64(True):
        search = optax.scale_by_backtracking_linesearch(30, decrease_factor=0.5, increase_factor=math.inf)

        @jax.jit
        def step(x: Any, state: Any) -> Any:
            value, grad = rosenbrock(x)
            grad = jnp.stack(grad)
            updates, state = search.update(
                -grad, state, x, value=value, grad=grad, value_fn=lambda x: rosenbrock(x)[0]
            )  # fmt: skip
            return x + updates, state

        theirs, ours = jnp.array([-1.2, 1.0]), np.array([-1.2, 1.0])
        state: Any = search.init(theirs)
        for _ in range(10):
            theirs, state = step(theirs, state)
            value, grad = rosenbrock(ours)
            down = -np.stack(grad)
            at = lambda step, x=ours, down=down: Trial(step, rosenbrock(x + step * down)[0], 0.0)  # noqa: E731
            trial, _ = run(floats(Backtracking(30, decrease_factor=0.5), Trial(0.0, value, -down @ down), 1.0), at)
            ours = ours + trial.step * down
            np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def trials(function: Function, step: float, name: str = "strong_wolfe") -> tuple[Trial, Trial, int]:
    """The start of a search, what it takes, and the number of trials."""
    start = Trial(0.0, *function(0.0))
    taken, count = run(SEARCHES[name](start, step, LIMITS), lambda step: Trial(step, *function(step)))
    return start, taken, count


FUNCTIONS: list[Function] = [
    lambda x: ((x - 3) ** 2, 2 * (x - 3)),
    lambda x: (x**4 - 5 * x, 4 * x**3 - 5),
    lambda x: (-x / (x * x + 2), (x * x - 2) / (x * x + 2) ** 2),
    lambda x: (math.cos(x) - x / 10, -math.sin(x) - 0.1),
    lambda x: (x - math.log(x + 1e-3), 1 - 1 / (x + 1e-3)),
]


@pytest.mark.parametrize("name", ["strong_wolfe", "zoom"])
@pytest.mark.parametrize("step", [1e-3, 0.3, 1.0, 40.0])
def test_a_step_has_the_conditions_of_wolfe(step: float, name: str) -> None:
    for function in FUNCTIONS:
        start, taken, _ = trials(function, step, name)
        promised = 1e-4 * taken.step * start.slope
        near = taken.slope <= (2e-4 - 1) * start.slope if name == "zoom" else False  # of Hager and Zhang
        assert taken.value <= start.value + (0 if near else promised)
        assert abs(taken.slope) <= 0.9 * abs(start.slope)


@pytest.mark.parametrize("name", SEARCHES)
def test_searches_end(name: str) -> None:
    """Where the function falls for ever, is no number, or rises though its slope says otherwise."""
    for function in (lambda x: (-x, -1.0), lambda x: (math.nan if x else 1.0, -1.0), lambda x: (1 + x, -1.0)):
        start, taken, count = trials(function, 1.0, name)
        assert count <= LIMITS.trials + 1
        assert taken.value <= start.value
        assert not math.isnan(taken.step)


def test_a_wall_is_not_crossed() -> None:
    def wall(x: float) -> tuple[float, float]:
        return (-math.log(1 - x) - 2 * x, 1 / (1 - x) - 2) if x < 1 else (math.inf, math.nan)

    assert trials(wall, 64.0)[1].step == pytest.approx(0.5, abs=0.49)
    assert strong_wolfe(Trial(0, 0, -1), 1, LIMITS).send(None) == 1
