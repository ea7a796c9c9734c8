"""Members, estimates and batched products of every family, against its definition in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rulec.es import Perturbation
from rulec.es.fitness import weights
from rulec.es.perturbation import of_members
from rulec.es.streams import Stream, short_weights
from rulec.jax import es
from rulec.jax.es.draws import JaxStream
from tests.jax.es.reference import CASES, estimate, member, members_of_rows

RNG = np.random.default_rng(11)
PARAMS = {
    "bias": RNG.standard_normal(5).astype(np.float32),
    "kernel": RNG.standard_normal((8, 5)).astype(np.float32),
}
#: Relative to the largest number; normal numbers of float32 are within 8 ulps of their radius.
NEAR = 64 * 2.0**-24

#: The others are slow, and what they compute is tested with NumPy's arrays every day.
EVERYDAY = ("signflip_both", "dropout")
ALL = [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.another) for name in CASES]


def check_near(found: Any, expected: Any) -> None:
    assert found.shape == expected.shape
    scale = np.abs(expected).max()
    assert np.abs(np.asarray(found, np.float64) - expected).max() <= NEAR * max(1.0, scale)


def third_step(params: Any, perturbation: Perturbation) -> es.State:
    state = es.init(params, perturbation)
    return state.next.next


@pytest.mark.parametrize("name", ALL)
def test_a_family_is_what_its_definition_says(name: str) -> None:
    perturbation = CASES[name]
    state = third_step(PARAMS, perturbation)
    x = np.random.default_rng(1).standard_normal((2 * perturbation.members, 8)).astype(np.float32)
    fitness = np.cos(2.0 * np.arange(perturbation.members)).astype(np.float32)  # weights of both signs

    @jax.jit
    def everything(params: Any, state: es.State, x: Any, fitness: Any) -> Any:
        members = jax.vmap(lambda index: es.member(params, state, perturbation, index))(
            jnp.arange(perturbation.members)
        )
        wrapped = es.batched(params, state, perturbation)
        return members, x @ wrapped["kernel"] + wrapped["bias"], es.estimate(params, state, perturbation, fitness)

    members, out, (grads, ok) = everything(PARAMS, state, x, fitness)
    assert ok
    rows = members_of_rows(perturbation, len(x))
    expected = {}
    for layer in filter(None, state.layers):
        weight = PARAMS[layer.name]
        each = [member(perturbation, weight, layer.number, 2, index) for index in range(perturbation.members)]
        expected[layer.name] = np.stack(each)
        check_near(members[layer.name], expected[layer.name])
        check_near(grads[layer.name], estimate(perturbation, weight, layer.number, 2, fitness))
    product = np.einsum("ri,rio->ro", x.astype(np.float64), expected["kernel"][rows])
    check_near(out, product + (expected["bias"][rows] if "bias" in expected else PARAMS["bias"]))


@pytest.mark.another
@pytest.mark.parametrize("name", ["independent", "sparse", "permuted_both", "signflip_both", "lowrank", "dropout"])
def test_convolutions_and_tables_see_the_weights_of_their_members(name: str) -> None:
    perturbation = CASES[name]
    rng = np.random.default_rng(3)
    params = {
        "conv": rng.standard_normal((3, 2, 8, 5)).astype(np.float32),
        "table": rng.standard_normal((8, 4)).astype(np.float32),
    }
    state = third_step(params, perturbation)
    images = rng.standard_normal((2 * perturbation.members, 5, 6, 8)).astype(np.float32)
    words = rng.integers(0, 8, (2 * perturbation.members, 3))
    rows = members_of_rows(perturbation, len(images))

    @jax.jit
    def batched(params: Any, images: Any, words: Any) -> Any:
        own = es.batched(params, state, perturbation)
        return es.conv(images, own["conv"], strides=(2, 1), padding="VALID"), es.take(own["table"], words)

    @jax.jit
    def alone(params: Any, image: Any, line: Any, index: Any) -> Any:
        own = es.member(params, state, perturbation, index)
        return es.conv(image[None], own["conv"], strides=(2, 1), padding="VALID")[0], es.take(own["table"], line)

    convolved, looked_up = batched(params, images, words)
    expected = [alone(params, *given) for given in zip(images, words, rows, strict=True)]
    check_near(convolved, np.stack([each for each, _ in expected]).astype(np.float64))
    check_near(looked_up, np.stack([each for _, each in expected]).astype(np.float64))
    index, grads = 4, jax.jit(lambda p, f: es.estimate(p, state, perturbation, f)[0])(params, images[::2, 0, 0, 0])
    check_near(es.member(params, state, perturbation, index)["conv"], member(perturbation, params["conv"], 0, 2, index))
    check_near(grads["conv"], estimate(perturbation, params["conv"], 0, 2, images[::2, 0, 0, 0]))


def test_whole_numbered_noise_is_summed_exactly_as_defined() -> None:
    """Bit for bit, over several chunks of a leaf."""
    perturbation = Perturbation("independent", 3, values="popcount", seed=9)
    params = {"w": jnp.zeros((300, 450))}
    state = es.init(params, perturbation).next
    fitness = np.array([0.5, -1.25, 3.0, 0.25, 2.0, -0.5], np.float32)
    (grads, _) = jax.jit(lambda p, s, f: es.estimate(p, s, perturbation, f))(params, state, fitness)
    short = short_weights(weights(of_members(fitness, perturbation), perturbation).values, "popcount")
    total = np.zeros(300 * 450, np.float32)
    for pair, weight in enumerate(short):
        total += weight * Stream(9, 0, 1, pair).whole("popcount", total.size).astype(np.float32)
    assert np.array_equal(grads["w"], total.reshape(300, 450))


def test_words_beyond_32_bits_of_blocks() -> None:
    offset = 5 * 2**34 - 6
    found = JaxStream(3, 2, 7, 4, 1).words(12, offset)
    assert np.array_equal(found, Stream(3, 2, 7, 4, 1).words(12, offset))


@pytest.mark.parametrize("family", ["independent", "lowrank"])
def test_halves_are_perturbed_as_wide_numbers_are_and_then_rounded(family: str) -> None:
    perturbation = Perturbation(family, 2, 0.5)
    half = {"w": jnp.asarray(PARAMS["kernel"], jnp.bfloat16)}
    state = es.init(half, perturbation)
    found = jax.jit(lambda half: es.member(half, state, perturbation, 3))(half)["w"]
    expected = member(perturbation, half["w"], 0, 0, 3)
    assert found.dtype == jnp.bfloat16
    assert np.abs(np.asarray(found, np.float64) - expected).max() <= 2.0**-8 * np.abs(expected).max()
    grads, _ = jax.eval_shape(lambda half: es.estimate(half, state, perturbation, jnp.arange(4.0)), half)
    assert grads["w"].dtype == jnp.bfloat16
