"""Weights in 16 bits under JAX: changes that optax adds, against new parameters, and against optax in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rulec.jax
from rulec.compiler.weights import DTYPES, PARTS
from rulec.errors import HyperError
from rulec.functional.bucket_step import increment
from rulec.jax.library import FUNCTIONS
from tests.jax.narrow import drawn, same

SHAPES = {"b": (40,), "w": (24, 40)}
EXACT = {"split": "param_low", "master": "param_master"}


def draws(seed: int, dtype: Any = jnp.float32) -> dict[str, Any]:
    return drawn(seed, SHAPES, dtype)


def wide(params: Any, state: Any, kind: str) -> dict[str, Any]:
    """The weights in float32."""
    if kind == "master":
        return {name: np.asarray(x) for name, x in state.param_master.items()}
    lows = {name: np.asarray(low, np.int32) for name, low in state.param_low.items()}
    return {
        name: (np.asarray(x, np.float32).view(np.int32) + lows[name]).view(np.float32) for name, x in params.items()
    }


def added(kind: str, rule: str, steps: int, dtype: Any = jnp.bfloat16, **keywords: Any) -> tuple[Any, Any]:
    """Parameters and state after some steps whose changes optax adds."""
    tx = rulec.jax.transform(rule, 1e-3, weights=kind, seed=3, **keywords, tags={})
    params = draws(0, dtype)
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        assert {str(x.dtype) for x in updates.values()} == {"float32"}
        return optax.apply_updates(params, updates), state

    for seed in range(1, steps + 1):
        params, state = step(params, state, draws(seed, dtype))
    return params, state


def stepped(kind: str, rule: str, steps: int, dtype: Any = jnp.bfloat16, **keywords: Any) -> tuple[Any, Any]:
    """The same by `rulec.jax.step`."""
    params = draws(0, dtype)
    state = rulec.jax.init(rule, params, weights=kind, **keywords, tags={})
    for seed in range(1, steps + 1):
        grads = draws(seed, dtype)
        params, state = rulec.jax.step(
            rule, params, grads, state, weights=kind, seed=3, lr=1e-3, backend="jax", donate=False, tags={}
        )
    return params, state


@pytest.mark.parametrize(
    "kind", ["split", "stochastic", *(pytest.param(kind, marks=pytest.mark.slow) for kind in PARTS if kind != "split")]
)
def test_changes_that_optax_adds_give_the_bits_of_a_step(kind: str) -> None:
    assert same(added(kind, "sgd", 2), stepped(kind, "sgd", 2))


@pytest.mark.another
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("rule", ["adamw", "lion", "lamb", "adafactor", "muon", "schedule_free_adamw", "prodigy"])
def test_changes_of_every_kind_of_rule_give_the_bits_of_a_step(kind: str, rule: str) -> None:
    assert same(added(kind, rule, 3), stepped(kind, rule, 3))


@pytest.mark.slow
def test_a_master_copy_of_float16_and_small_states_beside_it() -> None:
    words = {"state_dtype": "bfloat16_sr"}
    assert same(added("master", "adamw", 3, jnp.float16, **words), stepped("master", "adamw", 3, jnp.float16, **words))


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXACT)
def test_the_weights_are_those_of_optax_in_float32(kind: str) -> None:
    """Where plain bfloat16 weights lose all of the same changes."""
    rate, theirs = 1e-5, draws(0, jnp.bfloat16)
    tx = optax.adamw(rate, weight_decay=0.01)
    ours, ours_tx = theirs, rulec.jax.transform("adamw", rate, weights=kind)
    theirs = jax.tree.map(lambda x: x.astype(jnp.float32), theirs)
    update, wanted_of = jax.jit(ours_tx.update), jax.jit(tx.update)
    begun, state, moments = theirs, ours_tx.init(ours), tx.init(theirs)
    for seed in range(1, 6):
        grads = draws(seed, jnp.bfloat16)
        updates, state = update(grads, state, ours)
        ours = optax.apply_updates(ours, updates)
        wanted, moments = wanted_of(jax.tree.map(lambda x: x.astype(jnp.float32), grads), moments, theirs)
        theirs = optax.apply_updates(theirs, wanted)
    for name, weight in wide(ours, state, kind).items():
        np.testing.assert_allclose(weight - begun[name], theirs[name] - begun[name], atol=3e-7)
        assert np.abs(theirs[name] - begun[name]).max() > 3e-5


@pytest.mark.parametrize(("dtype", "binades"), [("bfloat16", 16), ("float16", 13)])
def test_which_changes_come_out(dtype: str, binades: int) -> None:
    """All significands of two numbers of either sign, the new one smaller or larger by powers of two."""
    digits = jnp.finfo(dtype).nmant
    rng = np.random.default_rng(1)
    one = jnp.asarray(1 + np.arange(2**digits) / 2**digits, dtype)
    old = one[:, None] if digits < 8 else one[rng.integers(0, 2**digits, 64)][:, None]

    @jax.jit
    def added(new: Any, old: Any) -> Any:
        each = increment(new, old, FUNCTIONS)
        return each.missed, optax.apply_updates(old, each.update)

    old = jnp.broadcast_to(old, (len(old), len(one)))
    for power in (
        (-14, -13, -12, -11, -1, 0, 1, 8, 14) if dtype == "float16" else (-24, -18, -17, -16, -15, -8, -1, 0, 1, 8, 20)
    ):
        for sign in (1, -1):
            new = (sign * one.astype(jnp.float32) * 2.0**power).astype(dtype)[None, :]
            missed, comes = added(new, old)
            assert np.array_equal(np.asarray(comes != new), np.asarray(missed))
            if power >= -binades + (sign < 0):
                assert not missed.any()
            else:
                off = np.abs(np.asarray(comes, np.float64) - np.asarray(new, np.float64)) / np.asarray(old, np.float64)
                assert off.max() < 2.0**-23


def test_a_weight_that_falls_by_more_is_that_of_optax_in_float32_at_its_rounding() -> None:
    """A rule that takes all of a weight but a thousandth of a millionth: the state goes with what optax adds up."""
    rule = """
name: Fall
summary: Takes nearly all of a weight.
hyper: {lr: 1e-3}
step: p = p - (1 - lr)*p
"""
    start = {"w": jnp.asarray(np.random.default_rng(0).standard_normal(500), jnp.float32).astype(jnp.bfloat16)}
    for kind in ("split", "kahan"):
        tx = rulec.jax.transform(rulec.parse(rule), 1e-9, weights=kind)
        updates, state = jax.jit(tx.update)(start, tx.init(start), start)
        params = optax.apply_updates(start, updates)
        weight = params["w"].astype(jnp.float32)
        if kind == "split":
            weight = wide(params, state, kind)["w"]
            assert not np.asarray(state.param_low["w"]).any()
        old = np.asarray(start["w"], np.float64)
        assert (np.abs(np.asarray(weight, np.float64) - 1e-9 * old) <= 2.0**-23 * np.abs(old)).all()


@pytest.mark.slow
def test_a_skipped_step_and_accumulation_keep_the_parts() -> None:
    rule = rulec.load("skip_not_finite") >> rulec.load("adamw")
    tx = optax.MultiSteps(rulec.jax.transform(rule, 1e-3, weights="split", tags={}), 2)
    params, update = draws(0, jnp.bfloat16), jax.jit(tx.update)
    state, seen = tx.init(params), []
    for grads in (draws(1, jnp.bfloat16), draws(2, jnp.bfloat16), draws(3, jnp.bfloat16), None):
        grads = grads or jax.tree.map(lambda x: jnp.full_like(x, jnp.inf), params)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        seen.append((params, state.inner_opt_state.param_low))
    assert same(seen[0][0], draws(0, jnp.bfloat16))
    assert not same(seen[0], seen[1])
    assert same(seen[1], seen[2])
    assert same(seen[2], seen[3])


def test_other_leaves_stay_plain() -> None:
    params = {"norm": jnp.ones(8), "w": jnp.ones((8, 8), jnp.bfloat16)}
    tx = rulec.jax.transform("adamw", 1e-3, weights="split")
    updates, state = tx.update(params, tx.init(params), params)
    assert state.param_low["norm"] is None
    plain = rulec.jax.transform("adamw", 1e-3)
    assert same(updates["norm"], plain.update(params, plain.init(params), params)[0]["norm"])


def test_wrong_words_are_one_sentence() -> None:
    with pytest.raises(HyperError, match=r"none of split, .*did you mean 'split'"):
        rulec.jax.transform("adamw", weights="splt")
    with pytest.raises(HyperError, match="is for parameters of bfloat16, and these are of float32"):
        rulec.jax.transform("adamw", weights="split").init(draws(0))
