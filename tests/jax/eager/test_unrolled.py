"""`rulec.jax.eager_step`: gradient and update in one function, the numbers and the state of the deferred step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rulec.jax
from rulec.language.library.load import load
from tests.jax.eager import models
from tests.jax.training import difference

#: Of the last bits of float32: XLA contracts and orders additions by what else is in the same function.
CLOSE = 2e-5


def after(rule: Any, params: Any, batch: Any, ways: str, **hyper: Any) -> Any:
    """Parameters after a step for each letter of `ways`: an eager one, or a deferred one."""
    made = rulec.jax.eager_step(models.loss, rule, tags={})
    tree, gradient = models.unstacked(params), jax.jit(jax.grad(models.loss))
    state = rulec.jax.init(rule, tree, tags={})
    for way in ways:
        if way == "e":
            tree, state, _ = made.step(tree, state, batch, **hyper)
        else:
            tree, state = rulec.jax.step(rule, tree, gradient(tree, batch), state, backend="jax", **hyper, tags={})
    return tree


def test_a_run_goes_from_eager_to_deferred_and_back_and_clips_as_it_does() -> None:
    rule, params, batch = "clip_by_global_norm >> momentum", models.deep(1), models.pairs()
    mixed, deferred = (after(rule, params, batch, ways, lr=0.01, max_norm=0.3) for ways in ("ede", "ddd"))
    assert difference(mixed, deferred, models.unstacked(params)) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["nadam", "adafactor", "muon", "noise >> sgd", "skip_not_finite >> adam"])
def test_every_kind_of_local_rule_is_the_deferred_one_in_float64(rule: str) -> None:
    with jax.enable_x64(True):
        params, batch = models.deep(2, 6, np.float64), models.pairs(6, 4, np.float64)
        eager, deferred = (after(rule, params, batch, ways) for ways in ("eee", "ddd"))
        bound = 1e-6 if load(rule).analysis.matrices else 1e-10
        assert difference(eager, deferred, models.unstacked(params)) < bound


def test_a_gradient_that_is_not_finite_changes_nothing_at_all() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.sum(params["a"] ** 2) + jnp.sum(jnp.sqrt(jnp.abs(params["b"]) * batch))

    made = rulec.jax.eager_step(loss, "adam", skip_nonfinite=True)
    params = {"a": jnp.arange(3.0), "b": jnp.array([0.0, 1.0])}
    state, old = made.init(params), jax.tree.map(np.array, params)
    params, state, outcome = made.step(params, state, 1.0, lr=0.1)
    assert not outcome.ok
    assert state.count == 0
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (params, old)), strict=True))
    assert not any(leaf.any() for leaf in jax.tree.leaves((state.m, state.v)))
    params["b"] = params["b"] + 1
    params, state, outcome = made.step(params, state, 1.0, lr=0.1)
    assert outcome.ok
    assert state.count == 1
    assert not np.array_equal(params["a"], old["a"])


def test_a_loss_may_take_a_key_and_return_more_and_a_rule_take_numbers() -> None:
    rule = rulec.parse("""
name: Informed
inputs: {weight: scalar}
step: direction = weight*g
""")

    def loss(params: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        noise = jax.random.normal(key, params.shape)
        return jnp.sum(params * noise * batch), noise

    made = rulec.jax.eager_step(loss, rule, has_aux=True, maximize=True, tags={})
    params, key = jnp.ones(4), jax.random.key(1)
    state = made.init(params)
    params, state, outcome = made.step(params, state, 2.0, key=key, lr=0.5, weight=3.0)
    assert np.allclose(params, 1 + 0.5 * 3 * 2 * np.asarray(jax.random.normal(key, (4,))), rtol=1e-6)
    assert np.array_equal(outcome.aux, jax.random.normal(key, (4,)))


def test_users_dtypes_are_their_own_while_their_loss_is_traced() -> None:
    seen = []

    def loss(params: Any, batch: Any) -> Any:
        seen.extend([jnp.arange(3).dtype, jnp.asarray(0.5).dtype, batch.dtype])
        return jnp.sum(params * batch)

    made = rulec.jax.eager_step(loss, "sgd")
    params = jnp.ones(3)
    made.step(params, made.init(params), np.ones(3), lr=0.1)
    assert {*seen} == {jnp.dtype("int32"), jnp.dtype("float32")}
