"""What a step takes in memory, from shapes alone: nobody's weights are made here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rulec.jax
from rulec.errors import RulecError
from rulec.jax.eager import StepBytes, deferred_bytes
from rulec.jax.eager.memory import bytes_of, residual_bytes, shape_of, shapes
from rulec.jax.library import compiler_options
from tests.jax.eager import formulations, models

WIDTH, ROWS, LAYERS = 256, 8, 24

in_order = pytest.mark.skipif(compiler_options() is None, reason="this XLA does not look for an order")


def shape(*sizes: int) -> Any:
    return shape_of(sizes, jnp.float32)


def deep(layers: int = LAYERS) -> Any:
    """The network of residual layers, of which nothing is there."""
    square = shape(layers, WIDTH, WIDTH)
    own = {"w": square, "v": square, "b": shape(layers, WIDTH)}
    return {"layers": own, "rest": {"out": shape(WIDTH, WIDTH)}}


def listed(params: Any) -> Any:
    one = jax.tree.map(lambda a: shape(*a.shape[1:]), params["layers"])
    return {"layers": [one] * params["layers"]["w"].shape[0], "rest": params["rest"]}


BATCH = (shape(ROWS, WIDTH), shape(ROWS, WIDTH))
ONE_LAYER = bytes_of({name: shape(*a.shape[1:]) for name, a in deep()["layers"].items()})
INPUTS = LAYERS * ROWS * WIDTH * 4


def inside_of_a_layer() -> int:
    """What the backward pass of one layer reads of its forward one, and what goes through it."""
    one = {name: shape(*a.shape[1:]) for name, a in deep()["layers"].items()}
    x = shape(ROWS, WIDTH)
    return residual_bytes(lambda given: jnp.sum(models.layer(*given)), (one, x)) + 2 * bytes_of(x)


def scan_bytes(rule: str, layers: int = LAYERS) -> StepBytes:
    return rulec.jax.eager_scan(models.layer, models.head, rule).bytes(deep(layers), BATCH, lr=1e-3)


@in_order
@pytest.mark.parametrize("rule", ["lion", pytest.param("adamw", marks=pytest.mark.slow)])
def test_a_scan_takes_the_layers_inputs_and_two_layers_gradients(rule: str) -> None:
    found = scan_bytes(rule)
    assert found.activations == INPUTS
    assert found.working <= INPUTS + 2 * ONE_LAYER + inside_of_a_layer()
    assert found.weights == LAYERS * ONE_LAYER + WIDTH * WIDTH * 4
    assert found.copies < 1000
    assert found.peak < 1.1 * (found.weights + found.state)


@in_order
@pytest.mark.slow
def test_nothing_but_the_layers_inputs_grows_with_their_number() -> None:
    few, many = scan_bytes("sgd", 6), scan_bytes("sgd", 48)
    assert many.activations == 8 * few.activations
    assert many.working - many.activations == pytest.approx(few.working - few.activations, abs=1000)


@in_order
@pytest.mark.slow
@pytest.mark.parametrize("rule", ["apollo", "lamb", "clip_by_global_norm >> adamw"])
def test_no_rule_makes_more_than_the_inputs_grow(rule: str) -> None:
    few, many = scan_bytes(rule, 6), scan_bytes(rule, 24)
    assert many.working - many.activations == pytest.approx(few.working - few.activations, abs=1000)
    assert many.working < INPUTS + 8 * ONE_LAYER


@in_order
@pytest.mark.slow
@pytest.mark.parametrize("name", formulations.NAMES)
def test_formulations_that_look_right_copy_the_stacks(name: str) -> None:
    found = formulations.layers_beyond_inputs(name, deep(), BATCH)
    assert found > 20 if name in formulations.COPYING else found < 5
    assert (found <= 2.05) == (name == "loop, a stack of one, in order")


@pytest.mark.slow
def test_an_unrolled_model_takes_two_gradients_beside_activations_in_two_passes_too() -> None:
    params, rule = listed(deep(6)), "clip_by_global_norm >> adamw"
    found = rulec.jax.eager_step(models.loss, rule, skip_nonfinite=True).bytes(params, BATCH, lr=1e-3)
    # A layer keeps its input, what it has inside, and the derivative of that.
    assert found.activations <= 4 * 6 * ROWS * WIDTH * 4
    assert found.working <= found.activations + 2 * WIDTH * WIDTH * 4 + 8 * ROWS * WIDTH * 4
    assert found.working < found.weights / 4
    assert found.state == 2 * found.weights + 4


def test_a_deferred_step_has_all_gradients_at_once() -> None:
    params = listed(deep(2))
    found = deferred_bytes(models.loss, "adamw", params, BATCH, lr=1e-3)
    assert found.gradients == found.weights == bytes_of(params)
    assert 4 * found.weights <= found.peak < 4.3 * found.weights
    assert found.as_dict()["peak"] == found.weights + found.state + found.batch + found.working + found.copies
    assert f"{found.peak:,}" in str(found)


def test_a_step_that_takes_more_than_it_may_is_refused_before_anything_is_donated() -> None:
    params, batch = models.deep(), models.pairs()
    loose = rulec.jax.eager_step(models.loss, "sgd", most=100_000)
    tight = rulec.jax.eager_step(models.loss, "sgd", most=10)
    tree = models.unstacked(params)
    state = loose.init(tree)
    with pytest.raises(
        RulecError, match=r"the step needs [\d,]+ bytes beside .* and most=10 allows no more: .* for act"
    ):
        tight.step(tree, state, batch, lr=0.1)
    with pytest.raises(MemoryError):
        tight.step(tree, state, batch, lr=0.1)
    loose.step(tree, state, batch, lr=0.1)


def test_bytes_of_arrays_are_those_of_their_shapes() -> None:
    tree = {"a": jnp.ones((2, 3)), "b": [jnp.ones(4, jnp.bfloat16), None]}
    assert bytes_of(tree) == bytes_of(shapes(tree)) == 24 + 8
