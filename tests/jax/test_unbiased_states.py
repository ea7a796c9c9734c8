"""States in bfloat16 that are rounded at random under JAX: the bits of plain arrays, in every way of a step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rulec
import rulec.jax
from rulec.array import Optimizer
from rulec.errors import HyperError
from rulec.functional.quantized import Unbiased
from tests.jax.narrow import drawn
from tests.pairs import paired

SHAPES = {"b": (40,), "w": (24, 40), "z": (3, 40, 9)}


def draws(seed: int) -> dict[str, Any]:
    return drawn(seed, SHAPES)


def on_arrays(rule: str, steps: int = 3) -> Optimizer:
    params = {name: np.array(p) for name, p in draws(0).items()}
    optimizer = Optimizer(rule, params, "numpy", state_dtype="bfloat16_sr", seed=3, lr=1e-3)
    for seed in range(1, steps + 1):
        optimizer.step({name: np.array(g) for name, g in draws(seed).items()})
    return optimizer


def check(state: Any, optimizer: Optimizer) -> None:
    """The states are those of plain arrays."""
    for name in SHAPES:
        for key, expected in optimizer.state(name).items():
            if key != "step":
                ours = getattr(state, key)[name]
                assert isinstance(ours, Unbiased)
                assert ours.values.dtype == jnp.bfloat16
                assert np.array_equal(np.asarray(ours.values), expected), (name, key)


@pytest.mark.parametrize(("rule", "backend"), paired(["adamw", "adagrad", "lion", "adafactor"], ["jax", "cpu"]))
def test_a_step_has_the_bits_of_plain_arrays(rule: str, backend: str) -> None:
    """The state itself says that it is rounded at random: `step` is not told again."""
    params = draws(0)
    state = rulec.jax.init(rule, params, state_dtype="bfloat16_sr")
    for seed in (1, 2, 3):
        params, state = rulec.jax.step(rule, params, draws(seed), state, seed=3, lr=1e-3, backend=backend)
    check(state, on_arrays(rule))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["galore", "shampoo", "apollo"])
def test_states_of_a_shape_of_their_own_are_those_of_floats_rounded(rule: str) -> None:
    """A step in floats from the same states: a tensor in bfloat16 is one of the two neighbours of the new state."""
    params = {"w": draws(0)["w"]}
    state = rulec.jax.init(rule, params, state_dtype="bfloat16_sr")
    for seed in (1, 2, 3):
        grads = {"w": draws(seed)["w"]}
        floats = jax.tree.map(
            lambda x: x.values.astype(jnp.float32) if isinstance(x, Unbiased) else x, state,
            is_leaf=lambda x: isinstance(x, Unbiased),
        )  # fmt: skip
        wanted, exact = rulec.jax.step(rule, params, grads, floats, seed=3, donate=False)
        params, state = rulec.jax.step(rule, params, grads, state, seed=3)
        np.testing.assert_allclose(params["w"], wanted["w"], rtol=1e-5, atol=1e-7)
        unbiased = [name for name in rulec.load(rule).state if isinstance(getattr(state, name), dict)
                    and isinstance(getattr(state, name)["w"], Unbiased)]  # fmt: skip
        assert unbiased
        for name in unbiased:
            ours, theirs = getattr(state, name)["w"].values, getattr(exact, name)["w"]
            np.testing.assert_allclose(np.asarray(ours, np.float32), theirs, rtol=2.0**-7, atol=1e-6)


def test_a_transformation_has_them_too() -> None:
    params = draws(0)
    tx = rulec.jax.transform("adamw", 1e-3, state_dtype="bfloat16_sr", seed=3)
    state = tx.init(params)
    for seed in (1, 2, 3):
        updates, state = jax.jit(tx.update)(draws(seed), state, params)
        params = optax.apply_updates(params, updates)
    check(state, on_arrays("adamw"))


def test_one_state_of_two_and_other_seeds() -> None:
    params, states = draws(0), []
    for seed in (0, 1):
        state = rulec.jax.init("adamw", params, state_dtype={"v": "bfloat16_sr"})
        states.append(rulec.jax.step("adamw", params, draws(1), state, seed=seed, donate=False)[1])
    assert states[0].m["w"].dtype == jnp.float32
    assert not np.array_equal(np.asarray(states[0].v["w"].values), np.asarray(states[1].v["w"].values))


def test_a_skipped_step_keeps_the_state() -> None:
    """A rule that leaves out steps with an infinite gradient."""
    rule, params = rulec.load("skip_not_finite") >> rulec.load("adamw"), draws(0)
    state = rulec.jax.init(rule, params, state_dtype="bfloat16_sr")
    params, state = rulec.jax.step(rule, params, draws(1), state)
    before = np.array(state.v["w"].values)
    bad = {name: g.at[...].set(jnp.inf) for name, g in draws(2).items()}
    _, after = rulec.jax.step(rule, params, bad, state)
    assert np.array_equal(np.asarray(after.v["w"].values), before)


@pytest.mark.slow
def test_a_complex_leaf_stays_exact() -> None:
    params = {"c": jnp.ones(3, jnp.complex64)}
    state = rulec.jax.init("adamw", params, state_dtype="bfloat16_sr")
    assert state.v["c"].dtype == jnp.complex64
    rulec.jax.step("adamw", params, {"c": jnp.ones(3, jnp.complex64)}, state)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda p: rulec.jax.init("prodigy", p, state_dtype={"x0": "bfloat16_sr"}), HyperError, "x0 is a copy"),
    ],
)
def test_what_cannot_be_is_one_sentence(wrong: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        wrong(draws(0))
