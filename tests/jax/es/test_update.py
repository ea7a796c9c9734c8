"""Steps: the estimate and the rule in one pass, without a gradient where both are of each element's own."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rulec.jax
from rulec.es import Perturbation
from rulec.jax import es
from rulec.jax.es.draws import CHUNK

SHAPES = {"large": (24, CHUNK), "small": (40, 20), "uneven": (2 * CHUNK + 77,), "number": ()}

ELEMENTWISE = {
    "adamw": lambda: rulec.jax.transform("adamw", lr=0.01),
    "lion": lambda: rulec.jax.transform("lion", lr=optax.cosine_decay_schedule(0.1, 100)),
    "optax_adamw": lambda: optax.adamw(0.01, mask={"large": True, "small": False, "uneven": False, "number": True}),
    "optax_momentum": lambda: optax.sgd(0.1, momentum=0.9),
}
JOINED = {
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01)),
    "adafactor": lambda: rulec.jax.transform("adafactor"),
    "lamb": lambda: optax.lamb(0.01),
}


def tree() -> Any:
    """New arrays: those of the last step were donated."""
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in SHAPES.items()}


def compiled(tx: Any, perturbation: Perturbation, state: es.State, fused: bool) -> Any:
    def step(params: Any, opt_state: Any, state: es.State, fitness: Any) -> Any:
        return es.update(params, opt_state, tx, state, perturbation, fitness, fused=fused)

    params, fitness = tree(), jnp.zeros(perturbation.members)
    return jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), state, fitness).compile()


def after_two_steps(step: Any, tx: Any, state: es.State) -> Any:
    params = tree()
    opt_state = tx.init(params)
    for fitness in ([0.5, 1.0, -2.0, 0.25], [1.0, jnp.nan, 0.5, 2.0]):
        params, opt_state, state, ok = step(params, opt_state, state, jnp.array(fitness))
        assert ok
    return params, opt_state, state


def same(found: Any, expected: Any) -> bool:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)


def near(found: Any, expected: Any) -> bool:
    """Equal but for products that XLA contracts with sums in the one and not in the other."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(np.abs(a - b).max() <= 2.0**-22 * np.abs(b).max() for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_fused_step_is_that_of_a_gradient_and_has_none(name: str) -> None:
    perturbation, tx = Perturbation("independent", 2, values="popcount"), ELEMENTWISE[name]()
    state = es.init(tree(), perturbation)
    fused, apart = (compiled(tx, perturbation, state, fused) for fused in (True, False))
    assert near(after_two_steps(fused, tx, state)[:2], after_two_steps(apart, tx, state)[:2])
    leaf = 4 * math.prod(SHAPES["large"])
    # Words of noise, and new parameters and states, of a part; with a gradient, all of it beside.
    assert fused.memory_analysis().temp_size_in_bytes < leaf / 2
    assert apart.memory_analysis().temp_size_in_bytes >= leaf


@pytest.mark.slow
@pytest.mark.parametrize("name", JOINED)
def test_a_rule_that_joins_elements_gets_its_gradients(name: str) -> None:
    perturbation, tx = Perturbation("independent", 2), JOINED[name]()
    state = es.init(tree(), perturbation)
    found, expected = (after_two_steps(compiled(tx, perturbation, state, x), tx, state) for x in (True, False))
    assert same(found, expected)


def test_without_a_finite_fitness_nothing_is_updated() -> None:
    params, perturbation = {"w": jnp.ones((4, 3))}, Perturbation("lowrank", 2)
    tx, state = rulec.jax.transform("adamw"), es.init(params, perturbation)
    opt_state = tx.init(params)

    @jax.jit
    def step(params: Any, opt_state: Any, state: es.State, fitness: Any) -> Any:
        grads, _ = es.estimate(params, state, perturbation, fitness)
        return grads, es.update(params, opt_state, tx, state, perturbation, fitness)

    grads, (after, opt_after, next_state, ok) = step(params, opt_state, state, jnp.array([jnp.nan, 1.0, 2.0, jnp.inf]))
    assert not ok
    assert not grads["w"].any()
    assert same((after, opt_after), (params, opt_state))
    assert next_state.step == 1
    _, (after, _, _, ok) = step(params, opt_state, state, jnp.array([jnp.nan, 1.0, 2.0, 3.0]))
    assert ok
    assert np.isfinite(after["w"]).all()
    assert not same(after, params)


def test_a_state_that_was_saved_goes_on_with_the_same_noise() -> None:
    params, perturbation = {"w": jnp.ones((4, 3))}, Perturbation("signflip", 2, seed=3)
    state = es.init(params, perturbation)
    fitness = jnp.arange(4.0)
    step = jax.jit(lambda state: (es.estimate(params, state, perturbation, fitness)[0], state.next))
    first, state = step(state)
    saved = jax.tree.map(np.asarray, state)
    second, _ = step(state)
    again, _ = step(jax.tree.unflatten(jax.tree.structure(es.init(params, perturbation)), jax.tree.leaves(saved)))
    assert same(again, second)
    assert not same(first, second)
