"""States in codes that products of matrices read before their update in a step, in JAX and MLX."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import rulec.jax
from rulec.formats import decode, parse
from tests.pairs import paired
from tests.runtime.test_coded_between import READERS, SHAPE, TIMES, Array, check_steps, rule_of

SOME = ["left", "factor", "tiles", "model"]
FORMATS = ["dynamic4", "int8", "float8_e4m3"]


def values_of(form: str, codes: Any, scales: Any) -> Array:
    """The values of codes in float64."""
    kept = parse(form).for_state(signed=True, floor=False)
    return np.asarray(decode(kept, np.array(codes), np.array(scales), SHAPE), np.float64)


@pytest.mark.parametrize(("reader", "time", "form"), paired(SOME, [*TIMES], FORMATS))
def test_a_step_of_jax_is_that_of_the_decoded_state(reader: str, time: str, form: str) -> None:
    rule = rule_of(READERS[reader], time)
    state = rulec.jax.init(rule, jnp.zeros(SHAPE, jnp.float32), state_dtype={"m": form})

    def step(grad: Array) -> Array:
        nonlocal state
        param, state = rulec.jax.step(rule, jnp.zeros(SHAPE, jnp.float32), jnp.asarray(grad), state)
        return np.asarray(param)

    def decoded(name: str) -> Array:
        held = getattr(state, name)
        return values_of(form, held.codes, held.scales) if name == "m" else np.asarray(held, np.float64)

    check_steps(reader, time, step, decoded)


@pytest.mark.parametrize(("reader", "time", "form"), paired(SOME, [*TIMES], FORMATS))
def test_a_step_of_mlx_is_that_of_the_decoded_state(reader: str, time: str, form: str) -> None:
    mx = pytest.importorskip("mlx.core")
    import rulec.mlx

    optimizer = rulec.mlx.optimizer(rule_of(READERS[reader], time))(state_dtype={"m": form})

    def step(grad: Array) -> Array:
        return np.array(optimizer.apply_gradients({"w": mx.array(grad)}, {"w": mx.zeros(SHAPE)})["w"])

    def decoded(name: str) -> Array:
        held = optimizer.state["w"]
        codes = held.get("m::codes", held.get("m"))
        return values_of(form, codes, held["m::scale"]) if name == "m" else np.array(held[name]).astype(np.float64)

    check_steps(reader, time, step, decoded)
