"""What cannot be right is one sentence when it is traced; the weights of directions, traced, are those of NumPy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rulec.errors import HyperError, RulecError, TensorError
from rulec.es import Perturbation
from rulec.es import fitness as numpy_fitness
from rulec.es.perturbation import of_members
from rulec.jax import es
from rulec.jax.es import state as jax_fitness

PAIRS = Perturbation("lowrank", 2)
PARAMS = {"w": jnp.ones((4, 3)), "kernel": jnp.ones((3, 3, 4, 2)), "b": jnp.ones(3), "n": jnp.ones(())}
STATE = es.init(PARAMS, PAIRS)
WRAPPED = es.batched(PARAMS, STATE, PAIRS)


@pytest.mark.parametrize(
    ("mistake", "kind", "says"),
    [
        (lambda: es.init({"n": jnp.ones(()), "i": jnp.arange(3)}, PAIRS), TensorError, "no leaf of the parameters"),
        (lambda: es.init(PARAMS, PAIRS, mask={"w": True}), TensorError, "which is no prefix of the parameters"),
        (lambda: es.init(PARAMS, PAIRS, mask=False), TensorError, "no leaf of the parameters"),
        (lambda: es.init({"w": jnp.ones((5, 2))}, Perturbation("dropout", 2)), HyperError, "5 inputs have no halves"),
        (lambda: Perturbation("lowrnk", 2), HyperError, "'lowrnk' is none of"),
        (lambda: Perturbation("lowrank", 0), HyperError, "directions=0"),
        (lambda: es.member(PARAMS, STATE, PAIRS, 4), HyperError, "no member 4: give a number from 0 to 3"),
        (lambda: es.member({"w": PARAMS["w"]}, STATE, PAIRS, 0), TensorError, "has 1 leaves, and had 4"),
        (
            lambda: es.batched({**PARAMS, "w": jnp.ones((4, 5))}, STATE, PAIRS), TensorError,
            r"the parameter w is float32\[4, 5\], and was float32\[4, 3\] when es.init was called",
        ),
        (lambda: es.estimate(PARAMS, STATE, PAIRS, jnp.ones(3)), TensorError, "one number for each of 4 members"),
        (lambda: es.estimate(PARAMS, STATE, PAIRS, jnp.ones(4), "rank"), HyperError, "shaping='rank' is none of"),
        (lambda: es.estimate(PARAMS, STATE, PAIRS, jnp.ones(4), jnp.sum), TensorError, "it must keep the shape"),
        (lambda: es.member_batch(jnp.ones((6, 4)), PAIRS, shared=False), TensorError, "batch of 6 rows cannot"),
        (lambda: jnp.ones((6, 4)) @ WRAPPED["w"], TensorError, "batch of 6 rows cannot"),
        (lambda: jnp.ones((4, 5)) @ WRAPPED["w"], TensorError, "cannot be applied to rows of 5 inputs"),
        (lambda: es.dot(jnp.ones((4, 4)), WRAPPED["kernel"]), TensorError, "a product takes a matrix"),
        (lambda: jnp.ones((4, 3)) + WRAPPED["w"], TensorError, "only vectors meet rows element by element"),
        (lambda: es.take(WRAPPED["b"], jnp.zeros(4, int)), TensorError, "a table is"),
        (
            lambda: es.conv(jnp.ones((4, 3, 3, 8)), WRAPPED["kernel"], feature_group_count=2), TensorError,
            "kernel has groups of channels",
        ),
        (
            lambda: es.estimate(PARAMS, STATE, Perturbation("lowrank", 2, values="popcount"), jnp.ones(4)), HyperError,
            "values='popcount', and had 'normal' when es.init was called",
        ),
        (lambda: es.report(STATE, Perturbation("spsa", 2), jnp.ones(4)), HyperError, "family='spsa', and had"),
        (lambda: es.set_sigma(STATE, PAIRS, 0.0), HyperError, "sigma=0.0 must be a finite number above 0"),
        (lambda: es.set_sigma(STATE, PAIRS, jnp.ones(2)), HyperError, "it must be one number"),
        (lambda: es.set_sigma(STATE, Perturbation("dropout", 2), 0.1), HyperError, "means nothing to dropout"),
        (lambda: es.evaluate(lambda p: p["b"], PARAMS, STATE, PAIRS), TensorError, "must be one number"),
        (lambda: es.evaluate(lambda p: 0.0, PARAMS, STATE, PAIRS, chunk=3), HyperError, "chunk=3 does not divide"),
    ],
)  # fmt: skip
def test_a_mistake_is_told(mistake: Callable[[], Any], kind: type[RulecError], says: str) -> None:
    with pytest.raises(kind, match=says):
        jax.eval_shape(mistake)


FITNESS = [
    [0.5, -1.0, 2.0, 0.25, 0.5, 1.5, 0.5, -3.0],
    [0.5, np.nan, 2.0, 0.25, 0.5, 1.5, np.inf, -3.0],
    [np.nan, np.nan, np.nan, 1.0, 0.5, 1.5, 0.5, -np.inf],
    [1.0] * 8,
]


@pytest.mark.parametrize("antithetic", [True, False])
def test_weights_of_directions_are_those_of_numpy(antithetic: bool) -> None:
    perturbation = Perturbation("independent", 4 if antithetic else 8, 0.5, antithetic)
    names = [None, "centered_rank", "zscore", "ars_top", jnp.tanh]

    @jax.jit
    def all_of(fitness: Any) -> Any:
        return [jax_fitness.weights(fitness, perturbation, shaping) for shaping in names]

    for fitness in FITNESS:
        for shaping, (found, ok) in zip(names, all_of(jnp.array(fitness)), strict=True):
            own = np.tanh if shaping is jnp.tanh else shaping
            expected = numpy_fitness.weights(of_members(fitness, perturbation), perturbation, own)
            assert ok == (not expected.empty)
            np.testing.assert_allclose(found, expected.values, rtol=2e-6, atol=2e-6)


def test_fitness_of_rows_is_that_of_their_members() -> None:
    rows = np.random.default_rng(0).standard_normal(4 * 3)
    found = jax_fitness.by_member(rows, PAIRS)
    np.testing.assert_allclose(found, of_members(rows, PAIRS), rtol=1e-6)


def test_a_mask_leaves_leaves_alone_and_numbers_the_others() -> None:
    state = es.init(PARAMS, PAIRS, mask={"w": True, "kernel": False, "b": True, "n": True})
    assert [layer and (layer.name, layer.number) for layer in state.layers] == [("b", 0), None, None, ("w", 1)]
    grads, _ = jax.eval_shape(lambda p: es.estimate(p, state, PAIRS, jnp.ones(4)), PARAMS)
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, PARAMS)
    assert es.batched(PARAMS, state, PAIRS)["kernel"] is PARAMS["kernel"]


def test_noise_that_is_rounded_away_is_told_of_arrays_that_are_there() -> None:
    perturbation = Perturbation("lowrank", 2, 1e-4, values="rademacher")
    half, large = {"w": jnp.ones((3, 4), jnp.bfloat16)}, {"w": np.full((3, 4), 1e5, np.float32), "b": jnp.ones(36)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        es.init({"w": jnp.ones((3, 4)), "b": jnp.zeros((0, 3), jnp.bfloat16)}, perturbation)
        es.init(jax.eval_shape(lambda: half), perturbation)
        jax.jit(lambda params: es.init(params, perturbation))(half)
        es.init({"w": half["w"], "b": jnp.ones((30, 40))}, perturbation, mask={"w": False, "b": True})
        gone = jnp.ones(4, jnp.bfloat16)
        gone.delete()
        es.init({"w": gone}, perturbation)
    with pytest.warns(RuntimeWarning, match=r"0.0001 is too small for bfloat16: 100% of weights") as said:
        es.init(half, perturbation)
    assert said[0].filename == __file__
    with pytest.warns(RuntimeWarning, match=r"too small for float32: 25% of weights"):
        es.init(large, perturbation)
    with pytest.warns(RuntimeWarning, match="too small for bfloat16"):
        jax.jit(lambda: es.init(half, perturbation))()
