"""`rulec.jax.eager_scan`: the numbers of the deferred step, whatever the rule and the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rulec
import rulec.jax
from rulec.language.library.load import load
from tests.jax.eager import models
from tests.jax.training import check_compiles_nothing, difference

#: Of the last bits of float32: XLA contracts and orders additions by what else is in the same function.
CLOSE = 2e-6

#: Of each kind of rule one.
KINDS = (
    "nadam", "schedule_free_adamw", "larc", "adafactor", "sm3", "muon", "galore", "noise >> sgd", "normalize >> sgd",
    "skip_not_finite >> adam",
)  # fmt: skip


def both(
    rule: Any, params: Any, batch: Any, steps: int, *, step: Callable[..., Any] | None = None, loss: Any = models.loss,
    **hyper: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Parameters after some eager steps, with a list of layers, and after as many of `rulec.jax.step`."""
    made = rulec.jax.eager_scan(models.layer, models.head, rule, tags={})
    ours, theirs = jax.tree.map(jnp.copy, params), models.unstacked(params)
    state, deferred = made.init(ours), rulec.jax.init(rule, theirs, tags={})
    gradient = jax.jit(jax.grad(loss))
    for _ in range(steps):
        ours, state, _ = made.step(ours, state, batch, **hyper)
        grads = gradient(theirs, batch)
        theirs, deferred = rulec.jax.step(rule, theirs, grads, deferred, backend="jax", **hyper, tags={})
    return models.unstacked(ours), theirs


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["clip_by_global_norm >> lamb"])
def test_an_eager_step_is_the_deferred_one(rule: str) -> None:
    before = models.unstacked(models.deep())
    ours, theirs = both(rule, models.deep(), models.pairs(), 3, lr=0.01)
    assert difference(ours, theirs, before) < 10 * CLOSE
    assert difference(ours, before) > 1e-4


def test_it_is_optax_s_adamw_and_no_step_of_a_schedule_compiles_anything(caplog: pytest.LogCaptureFixture) -> None:
    made, params, batch = rulec.jax.eager_scan(models.layer, models.head, "adamw"), models.deep(), models.pairs()
    schedule = optax.linear_schedule(0.02, 0.0, 10)
    state, theirs, tx = made.init(params), models.unstacked(params), optax.adamw(schedule, weight_decay=0.1)
    moments, gradient = tx.init(theirs), jax.jit(jax.value_and_grad(models.loss))
    for i in range(3):
        with check_compiles_nothing(caplog) if i else nullcontext():
            params, state, outcome = made.step(params, state, batch, lr=schedule, weight_decay=0.1)
        value, grads = gradient(theirs, batch)
        updates, moments = tx.update(grads, moments, theirs)
        theirs = optax.apply_updates(theirs, updates)
        assert abs(outcome.loss - value) < 1e-5
    assert difference(models.unstacked(params), theirs) < 1e-5
    assert state.layers.count.tolist() == [3, 3, 3]


@pytest.mark.another
@pytest.mark.parametrize("rule", KINDS)
def test_every_kind_of_local_rule_is_the_deferred_one_in_float64(rule: str) -> None:
    with jax.enable_x64(True):
        params, batch = models.deep(2, 6, np.float64), models.pairs(6, 4, np.float64)
        ours, theirs = both(rule, params, batch, 3)
        before = models.unstacked(models.deep(2, 6, np.float64))
        # Twelve digits where arithmetic is plain; matrix functions iterate, and lose some.
        bound = 1e-6 if load(rule).analysis.matrices else 1e-10
        assert difference(ours, theirs, before) < bound
        assert difference(ours, before) > 1e-9


@pytest.mark.slow
def test_a_transformer_with_a_tied_table_dropout_and_more_results() -> None:
    made = rulec.jax.eager_scan(models.block, models.cross_entropy, "momentum", embed=models.embed, has_aux=True)
    params, batch, key = models.transformer(2), models.tokens(), jax.random.key(3)
    theirs, state = models.unstacked(params), made.init(params)
    deferred = rulec.jax.init("momentum", theirs)
    gradient = jax.jit(jax.value_and_grad(models.transformer_loss, has_aux=True))
    for i in range(2):
        now = jax.random.fold_in(key, i)
        params, state, outcome = made.step(params, state, batch, key=now, lr=0.1)
        (value, accuracy), grads = gradient(theirs, batch, now)
        theirs, deferred = rulec.jax.step("momentum", theirs, grads, deferred, lr=0.1)
        assert abs(outcome.loss - value) < 1e-5
        assert outcome.aux == accuracy
    assert difference(models.unstacked(params), theirs) < 1e-4
    assert abs(made.loss(params, batch, key=now)[0] - gradient(theirs, batch, now)[0][0]) < 1e-5


@pytest.mark.slow
def test_layers_share_parameters_of_the_rest_and_see_the_batch_and_their_number() -> None:
    def layer(own: Any, x: Any, rest: Any, batch: Any, index: Any) -> tuple[Any, Any]:
        x = x + jnp.tanh(x @ own["w"] + rest["out"][0] + batch[1] * index) @ own["v"] + own["b"]
        return x, jnp.sum(x)

    def loss(params: Any, batch: Any) -> Any:
        x = batch[0]
        for index, own in enumerate(params["layers"]):
            x, _ = layer(own, x, params["rest"], batch, index)
        return models.head(params["rest"], x, batch)

    made = rulec.jax.eager_scan(layer, models.head, "sgd", layer_aux=True)
    params, batch = models.deep(), models.pairs()
    theirs = models.unstacked(params)
    grads = jax.grad(loss)(theirs, batch)
    theirs, _ = rulec.jax.step("sgd", theirs, grads, rulec.jax.init("sgd", theirs), lr=0.1, donate=False)
    params, _, outcome = made.step(params, made.init(params), batch, lr=0.1)
    assert difference(models.unstacked(params), theirs) < CLOSE
    assert outcome.layer_aux.shape == (3,)


def test_a_gradient_that_is_not_finite_changes_nothing_at_all() -> None:
    def layer(own: Any, x: Any, batch: Any) -> Any:
        # The gradient of b alone is infinite where the batch says so; what goes on backwards stays finite.
        return models.layer(own, x) + 0 * jnp.sqrt(jnp.abs(own["b"] * batch[2]))

    made = rulec.jax.eager_scan(layer, models.head, "adamw", skip_nonfinite=True)
    params = models.deep()
    params["layers"]["b"] = params["layers"]["b"].at[1].set(0.0)
    x, y = models.pairs()
    state = made.init(params)
    params, state, outcome = made.step(params, state, (x, y, 0.0), lr=0.1)
    kept = jax.tree.map(np.array, (params, state))
    assert not outcome.ok
    params["layers"]["b"] = params["layers"]["b"].at[1].set(0.5)
    params, state, outcome = made.step(params, state, (x, y, 1.0), lr=0.1)
    assert outcome.ok
    assert state.rest.count == 1
    before, after = made.init(models.deep()), kept[1]
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True))
    start = models.deep()
    start["layers"]["b"] = start["layers"]["b"].at[1].set(0.0)
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (start, kept[0])), strict=True))


@pytest.mark.slow
def test_one_half_precision_model_and_wide_states() -> None:
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), models.deep())
    batch = jax.tree.map(lambda p: p.astype(jnp.bfloat16), models.pairs())
    made = rulec.jax.eager_scan(models.layer, models.head, "momentum", state_dtype="float32")
    state = made.init(params)
    params, state, outcome = made.step(params, state, batch, lr=0.01)
    assert outcome.loss.dtype == params["layers"]["w"].dtype == jnp.bfloat16
    assert state.layers.m["w"].dtype == state.rest.m["out"].dtype == jnp.float32


@pytest.mark.slow
def test_parameters_and_state_are_donated_and_usable_inside_of_another_jit() -> None:
    made, params, batch = rulec.jax.eager_scan(models.layer, models.head, "lion"), models.deep(), models.pairs()
    state = made.init(params)

    inside = jax.jit(lambda params, state: made.step(params, state, batch, lr=0.01)[0])(params, state)
    gone = params["layers"]["w"]
    params, state, _ = made.step(params, state, batch, lr=0.01)
    assert gone.is_deleted()
    assert difference(inside, params) < CLOSE


@pytest.mark.slow
def test_patterns_and_tags_are_of_the_whole_model() -> None:
    rule = rulec.partition({"layers/b": None, "rest/*": rulec.part("sgd", lr=0.5), "...": "adamw"})
    made, params, batch = rulec.jax.eager_scan(models.layer, models.head, rule, tags={}), models.deep(), models.pairs()
    state, old = made.init(params), jax.tree.map(np.array, params)
    params, state, _ = made.step(params, state, batch, lr=0.01)
    assert np.array_equal(params["layers"]["b"], old["layers"]["b"])
    gradient = jax.grad(models.loss)(models.unstacked(jax.tree.map(jnp.array, old)), batch)["rest"]["out"]
    assert difference(params["rest"]["out"], old["rest"]["out"] - 0.5 * gradient) < CLOSE
    assert state.rest.m["out"] is None
    assert state.layers.m["w"].shape == (3, 8, 8)
