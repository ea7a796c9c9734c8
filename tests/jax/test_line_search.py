"""L-BFGS and line searches beside optax's: the same iterates, inside of jit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rulec.jax
from rulec.errors import HyperError
from rulec.runtime.line_search import Trial, Zoom, floats, run

Make = Callable[[Any], Any]

#: A name -> the transformation, of rulec.jax or optax.
SEARCHES: dict[str, Make] = {
    "lbfgs": lambda module: module.lbfgs(memory_size=3),
    "lbfgs with an unscaled estimate": lambda module: module.lbfgs(memory_size=2, scale_init_precond=False),
    "lbfgs with steps of 0.3": lambda module: module.lbfgs(0.3, memory_size=2, linesearch=None),
    "zoom": lambda module: optax.chain(
        optax.sgd(1.0), module.scale_by_zoom_linesearch(15, max_learning_rate=0.5, initial_guess_strategy="keep")
    ),
    "zoom with few trials": lambda module: optax.chain(
        optax.sgd(1.0), module.scale_by_zoom_linesearch(4, approx_dec_rtol=None)
    ),
    "backtracking": lambda module: optax.chain(
        optax.sgd(1.0), module.scale_by_backtracking_linesearch(40, store_grad=True)
    ),
}


def rosenbrock(params: Any) -> Any:
    x = jnp.concatenate([jnp.ravel(p) for p in params])
    return jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


def quadratic(params: Any) -> Any:
    x = jnp.concatenate([jnp.ravel(p) for p in params])
    return jnp.sum(jnp.logspace(0, 2, x.size) * (x - 1) ** 2) + 0.3 * jnp.sum(x) ** 2


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def iterates(tx: Any, function: Any, steps: int) -> Iterator[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    params: Any = [jnp.asarray(0.7 * rng.normal(size=shape)) for shape in ((3,), (2, 2))]
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, grad = jax.value_and_grad(function)(params)
        updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=function)
        return optax.apply_updates(params, updates), state, value

    for _ in range(steps):
        params, state, value = step(params, state)
        yield np.concatenate([np.ravel(x) for x in (value, *params)])


@pytest.mark.peer
@pytest.mark.another  # optax's searches take seconds to compile
@pytest.mark.parametrize("name", SEARCHES)
def test_iterates_are_those_of_optax(name: str) -> None:
    for function in (rosenbrock, quadratic):
        pair = (iterates(SEARCHES[name](module), function, 8) for module in (rulec.jax, optax))
        for ours, theirs in zip(*pair, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-13 * np.abs(theirs).max())


@pytest.mark.parametrize("name", [
    "lbfgs", "scale_by_lbfgs", "scale_by_zoom_linesearch", "scale_by_backtracking_linesearch",
])  # fmt: skip
def test_signatures_are_those_of_optax(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (rulec.jax, optax))
    assert [*ours] == [*theirs]
    assert all(ours[key].default == theirs[key].default for key in ours if key != "linesearch")


def test_a_trace_and_numbers_find_the_same_step() -> None:
    def value(x: Any) -> Any:
        return x * x * x * x - 9 * x * x - 5 * x

    def at(step: float) -> Trial:
        return Trial(step, value(step), 4 * step**3 - 18 * step - 5)

    tx = rulec.jax.scale_by_zoom_linesearch(20, initial_guess_strategy="one", curv_rtol=1e-3)
    zero = jnp.array(0.0)
    updates, state = tx.update(
        zero + 1.0, tx.init(zero), zero, value=zero, grad=zero - 5.0, value_fn=value
    )  # fmt: skip
    trial, count = run(floats(Zoom(20, curv_rtol=1e-3), at(0.0), 1.0), at)
    assert [float(state.learning_rate), float(updates)] == pytest.approx([trial.step, trial.step], rel=1e-12)
    assert int(state.info.num_linesearch_steps) == count > 3


@pytest.mark.slow
def test_values_and_gradients_of_the_state() -> None:
    for search in (
        rulec.jax.scale_by_zoom_linesearch(20), rulec.jax.scale_by_backtracking_linesearch(20, store_grad=True)
    ):  # fmt: skip
        params = jnp.array([1.0, 2.0])
        tx = optax.chain(optax.sgd(0.1), search)
        state: Any = tx.init(params)
        again = optax.value_and_grad_from_state(quadratic)
        value, grad = jax.value_and_grad(quadratic)(params)
        updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=quadratic)
        params = optax.apply_updates(params, updates)  # type: ignore[assignment]
        value, grad = again(params, state=state)
        wanted = jax.value_and_grad(quadratic)(params)
        np.testing.assert_allclose(value, wanted[0], rtol=1e-14)
        np.testing.assert_allclose(grad, wanted[1], rtol=1e-12, atol=1e-12)


def test_float32_stays_float32() -> None:
    with jax.enable_x64(False):
        tx = optax.chain(optax.sgd(0.1), rulec.jax.scale_by_backtracking_linesearch(9))
        params = jnp.array([1.0, 2.0])
        state: Any = tx.init(params)
        value, grad = jax.value_and_grad(quadratic)(params)
        updates, after = tx.update(grad, state, params, value=value, grad=grad, value_fn=quadratic)
        assert updates.dtype == jnp.float32
        assert jax.tree.map(jnp.result_type, state) == jax.tree.map(jnp.result_type, after)


def test_wrong_calls() -> None:
    params = jnp.array([1.0, 2.0])
    tx = rulec.jax.lbfgs(memory_size=1)
    with pytest.raises(HyperError, match="scale_by_zoom_linesearch needs the parameters, value, grad and value_fn"):
        tx.update(params, tx.init(params), params)
    zoom = rulec.jax.scale_by_zoom_linesearch(5)
    with pytest.raises(HyperError, match="was given batch, which value_fn does not take"):
        zoom.update(params, zoom.init(params), params, value=1.0, grad=params, value_fn=lambda x: jnp.sum(x), batch=3)
    with pytest.raises(HyperError, match="initial_guess_strategy='two': give 'one' or 'keep'"):
        rulec.jax.scale_by_zoom_linesearch(5, initial_guess_strategy="two")
    with pytest.raises(HyperError, match="prints nothing: leave verbose out"):
        rulec.jax.scale_by_backtracking_linesearch(5, verbose=True)
    for size in (0, 21, 2.5, True, "a"):
        with pytest.raises(HyperError, match="memory"):
            rulec.jax.lbfgs(memory_size=size)
