"""Weights in 16 bits and states in fewer under eager updates: the bits of `rulec.jax.step`.

The models are linear in their parameters, and their gradients small whole numbers; so are the hyper-parameters powers
of two. Every operation of the update is exact then, and XLA has nothing to round in another way.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rulec
import rulec.jax
from rulec.compiler.weights import DTYPES
from rulec.errors import HyperError
from rulec.formats import NAMES
from rulec.functional.quantized import Coded, Unbiased
from tests.jax.narrow import same

LAYERS, SHAPE = 3, (64, 80)

#: A mean and a step of sums of few digits.
PLAIN = rulec.parse("""
name: Plain
summary: A mean of gradients.
hyper: {lr: 1e-3}
state: {m: 0}
step: |
  m = 0.5*m + 0.5*g
  direction = m
""")


def numbers(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(np.random.default_rng(seed).integers(-8, 9, shape), dtype)


def params_of(dtype: Any) -> Any:
    random = np.random.default_rng(0)
    return {
        "layers": {"w": jnp.asarray(random.standard_normal((LAYERS, *SHAPE)), jnp.float32).astype(dtype)},
        "rest": {"norm": jnp.ones(8), "out": jnp.asarray(random.standard_normal(SHAPE), jnp.float32).astype(dtype)},
    }


def layer(own: Any, x: Any, batch: Any, index: Any) -> Any:
    """Adds the product with the numbers of this layer: their gradient are these numbers."""
    return x + jnp.sum(own["w"].astype(jnp.float32) * batch[0][index])


def head(rest: Any, x: Any, batch: Any) -> Any:
    return x + jnp.sum(rest["out"].astype(jnp.float32) * batch[0][-1]) + jnp.sum(rest["norm"])


def embed(rest: Any, batch: Any) -> Any:
    return jnp.zeros(())


def loss(params: Any, batch: Any) -> Any:
    x = jnp.zeros(())
    for index, own in enumerate(params["layers"]):
        x = layer(own, x, batch, index)
    return head(params["rest"], x, batch)


def listed(params: Any) -> Any:
    layers = [{"w": params["layers"]["w"][i]} for i in range(LAYERS)]
    return {"layers": layers, "rest": dict(params["rest"])}


def copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def deferred(dtype: Any, weights: str, words: Any, steps: int) -> tuple[Any, Any]:
    params = listed(copied(params_of(dtype)))
    state = rulec.jax.init(PLAIN, params, weights=weights, state_dtype=words)
    for seed in range(steps):
        grads = jax.grad(loss)(params, (numbers(seed, (LAYERS + 1, *SHAPE)),))
        params, state = rulec.jax.step(PLAIN, params, grads, state, weights=weights, seed=5, lr=2.0**-10, backend="jax")
    return params, state


def eager(kind: str, dtype: Any, weights: str, words: Any, steps: int) -> tuple[Any, Any]:
    keywords = {"weights": weights, "state_dtype": words, "seed": 5}
    params = copied(params_of(dtype))
    if kind == "scan":
        made: Any = rulec.jax.eager_scan(layer, head, PLAIN, embed=embed, **keywords)
    else:
        made, params = rulec.jax.eager_step(loss, PLAIN, **keywords), listed(params)
    state = made.init(params)
    for seed in range(steps):
        params, state, _ = made.step(params, state, (numbers(seed, (LAYERS + 1, *SHAPE)),), lr=2.0**-10)
    if kind == "scan":
        params, state = made.listed(params, state)
        if steps > 1:
            again = made.listed(*made.stacked(copied(params), copied(state)))
            assert same((params, state), again)
    return params, state


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scan", "step"])
def test_split_weights_and_codes_have_the_bits_of_a_step(kind: str) -> None:
    ours = eager(kind, jnp.bfloat16, "split", "dynamic8", 2)
    assert same(ours, deferred(jnp.bfloat16, "split", "dynamic8", 2))
    assert isinstance(ours[1].m["layers"][0]["w"], Coded)
    assert ours[1].m["rest"]["norm"].dtype == jnp.float32
    assert ours[1].param_low["rest"]["norm"] is None


def test_weights_and_states_at_random_have_the_bits_of_a_step() -> None:
    """The number of a layer's array in the whole model chooses its random bits."""
    ours = eager("scan", jnp.bfloat16, "stochastic", "bfloat16_sr", 1)
    assert same(ours, deferred(jnp.bfloat16, "stochastic", "bfloat16_sr", 1))
    assert isinstance(ours[1].m["layers"][0]["w"], Unbiased)


@pytest.mark.another
@pytest.mark.parametrize("kind", ["scan", "step"])
@pytest.mark.parametrize("weights", DTYPES)
def test_all_kinds_of_weights(kind: str, weights: str) -> None:
    assert same(eager(kind, jnp.bfloat16, weights, None, 3), deferred(jnp.bfloat16, weights, None, 3))


@pytest.mark.another
@pytest.mark.parametrize("kind", ["scan", "step"])
@pytest.mark.parametrize("word", NAMES)
def test_all_formats(kind: str, word: str) -> None:
    assert same(eager(kind, jnp.float32, "", word, 3), deferred(jnp.float32, "", word, 3))


def test_weights_for_no_parameter_are_refused() -> None:
    made = rulec.jax.eager_scan(layer, head, PLAIN, embed=embed, weights="split")
    with pytest.raises(HyperError, match="is for parameters of bfloat16, and these are of float32"):
        made.init(params_of(jnp.float32))
