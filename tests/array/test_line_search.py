"""A line search around a rule of arrays, beside optax's around the same rule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rulec.array
from rulec.errors import HyperError, RulecError
from tests.backends.here import BRAIN

START = np.array([-1.2, 1.0, 0.5])


def value_and_gradient(x: Any) -> tuple[Any, list[Any]]:
    """Rosenbrock's function, of NumPy or JAX."""
    bends = [x[i + 1] - x[i] * x[i] for i in range(2)]
    value = sum(100 * bend * bend + (1 - x[i]) ** 2 for i, bend in enumerate(bends))
    inner = [-400 * bend * x[i] - 2 * (1 - x[i]) for i, bend in enumerate(bends)]
    return value, [inner[0], inner[1] + 200 * bends[0], 200 * bends[1]]


def theirs(tx: Any, steps: int) -> np.ndarray[Any, Any]:
    with jax.enable_x64(True):

        @jax.jit
        def step(x: Any, state: Any) -> Any:
            value, grad = value_and_gradient(x)
            grad = jnp.stack(grad)
            updates, state = tx.update(
                grad, state, x, value=value, grad=grad, value_fn=lambda x: value_and_gradient(x)[0]
            )  # fmt: skip
            return x + updates, state

        x, state = jnp.asarray(START), tx.init(jnp.asarray(START))
        for _ in range(steps):
            x, state = step(x, state)
        return np.asarray(x)


def searched(rule: str, lr: float, search: Any, **keywords: Any) -> tuple[Any, Callable[[], Any]]:
    """An array, and a function that takes a step of it."""
    x = START.copy()
    line = rulec.array.LineSearch(rulec.array.Optimizer(rule, [x], lr=lr), search, **keywords)

    def evaluate() -> tuple[Any, Any]:
        value, grad = value_and_gradient(x)
        return value, [np.array(grad)]

    return x, lambda: line.step(evaluate)


@pytest.mark.peer
def test_backtracking_around_sgd_is_that_of_optax() -> None:
    x, step = searched("sgd", 1.0, rulec.array.Backtracking(40))
    for _ in range(8):
        step()
    wanted = theirs(optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(40)), 8)
    np.testing.assert_allclose(x, wanted, rtol=1e-12)


@pytest.mark.peer
@pytest.mark.slow  # optax's search takes seconds to compile
@pytest.mark.parametrize("keep", [True, False])
def test_zoom_around_sgd_is_that_of_optax(keep: bool) -> None:
    x, step = searched("sgd", 1.0, rulec.array.Zoom(20), keep=keep)
    for _ in range(8):
        step()
    search = optax.scale_by_zoom_linesearch(20, initial_guess_strategy="keep" if keep else "one")
    np.testing.assert_allclose(x, theirs(optax.chain(optax.sgd(1.0), search), 8), rtol=1e-12)


def test_losses_fall() -> None:
    for search in (rulec.array.Backtracking(40), rulec.array.Zoom(20)):
        _, step = searched("lion", 0.3, search)
        losses = [float(step()) for _ in range(6)]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0] / 2


def test_an_error_puts_arrays_and_states_back() -> None:
    x, calls = START.copy(), []
    optimizer = rulec.array.Optimizer("adam", [x], lr=0.5)
    line = rulec.array.LineSearch(optimizer, rulec.array.Backtracking(40))

    def evaluate() -> tuple[Any, Any]:
        calls.append(x.copy())
        if len(calls) in (2, 6):
            raise ZeroDivisionError
        value, grad = value_and_gradient(x)
        return value, [np.array(grad)]

    with pytest.raises(ZeroDivisionError):
        line.step(evaluate)
    assert not np.array_equal(calls[-1], START)
    np.testing.assert_array_equal(x, START)
    assert optimizer.state_dict()["state"] == {}
    with pytest.raises(HyperError, match="cannot be made of 'armijo': give a Backtracking"):
        rulec.array.LineSearch(optimizer, "armijo")  # type: ignore[arg-type]
    with pytest.raises(RulecError, match="LineSearch evaluates the model again in a step"):
        line.step(None)  # type: ignore[arg-type]
    assert copy.deepcopy(line).learning_rate == 1


def weights_of(array: Any, states: dict[str, Any], kind: str) -> Any:
    """The float32 weights of an array in bfloat16 and what is beside it."""
    if kind == "split":
        return (array.astype(np.float32).view(np.int32) + states["param::low"]).view(np.float32)
    beside = states["param::master" if kind == "master" else "param::lost"].astype(np.float32)
    return beside if kind == "master" else array.astype(np.float32) + beside


class Quadratic:
    """A quadratic function of a weight in float32, and of a bfloat16 weight with the rest beside it.

    Both are evaluated at the weight in bfloat16, as a model is.
    """

    def __init__(self, kind: str, search: Any, sign: float = 1.0) -> None:
        draws = np.random.default_rng(0)
        factor = draws.standard_normal((40, 40))
        self.square, self.linear, self.sign, self.kind = factor @ factor.T / 40, draws.standard_normal(40), sign, kind
        self.narrow = draws.standard_normal(40).astype(BRAIN)
        self.wide = self.narrow.astype(np.float32)
        self.optimizer = rulec.array.Optimizer("sgd", [self.narrow], "numpy", lr=1.0, weights=kind)
        self.line = rulec.array.LineSearch(self.optimizer, search)
        other = rulec.array.Optimizer("sgd", [self.wide], "numpy", lr=1.0)
        self.other = rulec.array.LineSearch(other, search)

    def evaluate(self, array: Any) -> tuple[Any, list[Any]]:
        x = self.rounded(array).astype(np.float64)
        gradient = (self.square @ x - self.linear).astype(BRAIN).astype(array.dtype)
        return x @ self.square @ x / 2 - self.linear @ x, [gradient * array.dtype.type(self.sign)]

    def rounded(self, array: Any) -> Any:
        """The weight in bfloat16: a `split` weight is rounded away from zero where it is between two numbers."""
        if self.kind == "split" and array.dtype == np.float32:
            array = (array.view(np.uint32) + np.uint32(0x8000) & np.uint32(0xFFFF0000)).view(np.float32)
        return array.astype(BRAIN)

    def step(self) -> None:
        self.line.step(lambda: self.evaluate(self.narrow))
        self.other.step(lambda: self.evaluate(self.wide))

    @property
    def weights(self) -> Any:
        (states,) = (self.optimizer.state(name) for name in self.optimizer.names)
        return weights_of(self.narrow, states, self.kind)


@pytest.mark.parametrize("search", [rulec.array.Backtracking(15), rulec.array.Zoom(15)])
@pytest.mark.parametrize("kind", ["split", "master"])
def test_weights_of_two_parts_go_the_way_of_float32(kind: str, search: Any) -> None:
    task = Quadratic(kind, search)
    for _ in range(6):
        task.step()
        assert 0 < task.line.learning_rate != 1
        assert task.weights.tobytes() == task.wide.tobytes()
        assert task.narrow.tobytes() == task.rounded(task.wide).tobytes()


def test_a_lost_part_goes_along() -> None:
    task = Quadratic("kahan", rulec.array.Backtracking(15))
    for _ in range(6):
        task.step()
    np.testing.assert_allclose(task.weights, task.wide, rtol=0, atol=2.0**-13)


@pytest.mark.parametrize("kind", ["split", "master", "kahan"])
def test_where_no_trial_is_good_enough_weights_stay_with_their_parts(kind: str) -> None:
    task = Quadratic(kind, rulec.array.Backtracking(3, max_learning_rate=1e-3))
    task.step()
    before = task.weights.tobytes(), task.narrow.tobytes()
    task.sign = -1.0
    task.step()
    assert task.line.learning_rate == 0
    assert (task.weights.tobytes(), task.narrow.tobytes()) == before


def test_weights_that_are_rounded_at_random_are_refused() -> None:
    optimizer = rulec.array.Optimizer("sgd", [np.ones(3, BRAIN)], weights="stochastic")
    with pytest.raises(HyperError, match="rounds at random in whole steps"):
        rulec.array.LineSearch(optimizer, rulec.array.Backtracking(3))
