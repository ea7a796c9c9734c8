"""The scale of noise is in the state: what members have, an estimate is divided by, without a second compilation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rulec.es import Perturbation
from rulec.jax import es
from tests.jax.es.reference import estimate, member

TX = optax.scale(-1.0)
PARAMS = {"w": jnp.linspace(-1, 1, 12).reshape(4, 3), "b": jnp.ones(3)}


@pytest.mark.parametrize(
    "family", ["independent", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lowrank", "signflip"))]
)
def test_members_and_estimates_have_the_sigma_of_the_state(family: str) -> None:
    pairs = Perturbation(family, 3, 0.5, values="rademacher")  # type: ignore[arg-type]
    before = es.init(PARAMS, pairs)
    fitness, x = jnp.linspace(-1, 2, 6) ** 2, jnp.ones((6, 4))
    traces = []

    @jax.jit
    def step(state: es.State) -> Any:
        traces.append(state)
        own = es.batched(PARAMS, state, pairs)
        updates = es.update(PARAMS, TX.init(PARAMS), TX, state, pairs, fitness)
        return x @ own["w"] + own["b"], es.estimate(PARAMS, state, pairs, fitness)[0], updates[0]

    step(before)
    rows, grads, moved = step(es.set_sigma(before, pairs, jnp.float32(0.125)))
    assert len(traces) == 1
    now = replace(pairs, sigma=0.125)
    for layer, name in enumerate(("b", "w")):
        expected = estimate(now, np.asarray(PARAMS[name]), layer, 0, np.asarray(fitness))
        np.testing.assert_allclose(grads[name], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        np.testing.assert_allclose(PARAMS[name] - moved[name], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    for index in range(6):
        w, b = (member(now, np.asarray(PARAMS[name]), layer, 0, index) for layer, name in ((1, "w"), (0, "b")))
        np.testing.assert_allclose(rows[index], np.ones(4) @ w + b, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_an_estimate_does_not_ask_the_perturbation_for_its_sigma() -> None:
    pairs = Perturbation("lowrank", 2, 0.5)
    state, fitness = es.init(PARAMS, pairs), jnp.arange(4.0)
    expected, _ = es.estimate(PARAMS, state, pairs, fitness)
    found, _ = es.estimate(PARAMS, state, replace(pairs, sigma=0.25), fitness)
    for name in PARAMS:
        np.testing.assert_array_equal(found[name], expected[name])
