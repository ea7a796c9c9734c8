"""Bits drawn from probabilities, and the gradient of what they are expected to give."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rulec.errors import TensorError
from rulec.es.binary import Bits, draw, likely, member_weights, pack, score_gradient, unpack
from rulec.es.binary.weights import logits, thresholds
from rulec.es.streams import BITS, Stream

Array = np.ndarray[Any, Any]

SHAPES = [(1,), (3, 7), (2, 64), (5, 65), (2, 3, 2, 129), (4, 130)]


def theta_of(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("backend", ["numpy", "cpu", "c"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("signs", [1, 2])
def test_a_bit_is_1_where_its_word_is_below_its_probability(backend: str, shape: Any, signs: int) -> None:
    theta = theta_of(*shape)
    bits = Bits(seed=2**31 + 5, layer=3, step=2**33 + 7, directions=3, signs=signs)
    found = unpack(draw(theta, bits, backend=backend), shape[-1])
    assert found.shape == (3 * signs, *shape)
    p = 1 / (1 + np.exp(-5 * theta.astype(np.float64) / (np.abs(theta.astype(np.float64)).mean() + 1e-5)))
    for member in range(3 * signs):
        words = Stream(2**31 + 5, 3, 2**33 + 7, member % 3, BITS).words(theta.size).reshape(shape)
        words = words if member < 3 else 2**32 - 1 - words
        assert (found[member] == (words < p * 2**32)).all()


@pytest.mark.parametrize("backend", ["cpu", "c"])
def test_backends_draw_the_same_bits(backend: str) -> None:
    theta, bits = theta_of(37, 333), Bits(seed=1, layer=0, step=0, directions=5, signs=2)
    assert (draw(theta, bits, backend=backend) == draw(theta, bits, backend="numpy")).all()


def test_seeds_layers_steps_and_directions_share_no_bits() -> None:
    theta = np.zeros((4, 64))
    base = {"seed": 1, "layer": 2, "step": 3, "directions": 2}
    drawn = [draw(theta, Bits(**{**base, name: base[name] + 1}))[:2] for name in ("seed", "layer", "step")]
    drawn.append(draw(theta, Bits(**base)))
    everything = [words.tobytes() for members in drawn for words in members]
    assert len(set(everything)) == len(everything)


def test_as_many_bits_are_1_as_their_probability_says() -> None:
    """Of 2**20 bits of each, within seven standard deviations."""
    z = np.array([-4.0, -1.0, 0.0, 0.3, 2.5])
    count = 2**20
    for value in z:
        words = draw(np.full((1, count), value), Bits(seed=9, layer=0, step=0, directions=1), None)
        p = 1 / (1 + np.exp(-value))
        assert abs(unpack(words, count).mean() - p) < 7 * np.sqrt(p * (1 - p) / count)


def test_the_second_sign_has_the_same_chance_and_the_opposite_luck() -> None:
    words = draw(np.zeros((8, 64)), Bits(seed=0, layer=0, step=0, directions=2, signs=2))
    assert (words[:2] == ~words[2:]).all()


def test_the_extremes_of_theta_stay_finite_and_never_certain() -> None:
    z = np.array([-1e308, -1e3, 0.0, 1e3, 1e308])
    assert thresholds(z).tolist() == [1, 1, 2**31, 2**32 - 1, 2**32 - 1]
    for theta in (np.zeros((2, 3)), np.full((2, 3), 1e38, np.float32), np.full((2, 3), 6e4, np.float16)):
        words = draw(theta, Bits(0, 0, 0, 4))
        gradient = score_gradient(theta, words, np.array([0.5, -0.5, 0.25, -0.25]))
        assert np.isfinite(logits(theta)).all()
        assert np.isfinite(gradient).all()
    with pytest.raises(TensorError, match="are not all finite: lower the learning rate"):
        draw(np.array([[1.0, np.nan]]), Bits(0, 0, 0, 1))


def test_the_most_likely_weights() -> None:
    assert likely(np.array([-1.0, 0.0, 2.0])).tolist() == [False, False, True]


@pytest.mark.parametrize("backend", ["numpy", "cpu", "c"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_weighted_sum_of_bits(backend: str, shape: Any) -> None:
    """Weights that sum to zero, so that probabilities do not count; and any weights."""
    theta = theta_of(*shape)
    words = draw(theta, Bits(seed=3, layer=1, step=0, directions=6))
    weights = np.random.default_rng(0).normal(size=6)
    found = score_gradient(theta, words, weights, None, backend=backend)
    p = np.floor(2.0**32 / (1 + np.exp(-theta.astype(np.float64)))) * 2.0**-32
    expected = np.einsum("m,m...->...", weights, unpack(words, shape[-1]) - p)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    assert (found == score_gradient(theta, words, weights, None, backend="numpy")).all()


def everything(theta: Array) -> Array:
    """Every choice of bits."""
    return np.array(list(itertools.product([False, True], repeat=theta.size))).reshape(-1, *theta.shape)


def expected_fitness(theta: Array, fitness: Callable[[Array], Array], sharpness: float | None) -> float:
    """The mean over all choices of bits, by their probabilities."""
    choices = everything(theta)
    p = 1 / (1 + np.exp(-logits(theta, sharpness)))
    chances = np.where(choices, p, 1 - p).reshape(len(choices), -1).prod(axis=1)
    return float(chances @ fitness(choices))


def fitness_of(choices: Array) -> Array:
    """Something without symmetry."""
    signs = np.where(choices, 1.0, -1.0).reshape(len(choices), -1)
    return np.sin(signs @ np.arange(1, signs.shape[1] + 1)) + 2.0 * signs[:, 0] * signs[:, -1] + 3.0


@pytest.mark.parametrize("sharpness", [None, 5.0, 1.5])
def test_the_score_gradient_is_that_of_the_expected_fitness(sharpness: float | None) -> None:
    """All choices of bits as members, weighted by minus fitness times probability, against finite differences."""
    theta = np.array([[0.3, -0.2, 0.05], [0.6, -0.9, 0.1]])
    choices = everything(theta)
    p = 1 / (1 + np.exp(-logits(theta, sharpness)))
    chances = np.where(choices, p, 1 - p).reshape(len(choices), -1).prod(axis=1)
    found = score_gradient(theta, pack(choices), -fitness_of(choices) * chances, sharpness)
    for index in np.ndindex(theta.shape):
        step = np.zeros_like(theta)
        step[index] = 1e-5
        above, below = (expected_fitness(theta + s, fitness_of, sharpness) for s in (step, -step))
        assert found[index] == pytest.approx(-(above - below) / 2e-5, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("signs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_estimate_has_no_bias(signs: int) -> None:
    """The mean of 4000 estimates is the gradient within six standard errors, which are small beside it."""
    theta = np.array([[0.3, -0.2, 0.05, -0.7]])
    choices = everything(theta)
    p = 1 / (1 + np.exp(-logits(theta, None)))
    chances = np.where(choices, p, 1 - p).reshape(len(choices), -1).prod(axis=1)
    exact = score_gradient(theta, pack(choices), -fitness_of(choices) * chances, None)
    found = []
    for step in range(4000):
        words = draw(theta, Bits(seed=11, layer=0, step=step, directions=3, signs=signs), None)
        fitness = fitness_of(unpack(words, 4)).reshape(signs, 3)
        found.append(score_gradient(theta, words, member_weights(fitness), None))
    error = np.mean(found, axis=0) - exact
    assert (np.abs(error) < 6 * np.std(found, axis=0) / np.sqrt(len(found))).all()
    assert np.abs(exact).max() > 6 * np.max(np.std(found, axis=0)) / np.sqrt(len(found))


def test_weights_of_members_have_the_mean_of_the_others_as_baseline() -> None:
    fitness = np.array([[1.0, 4.0, 2.0], [3.0, 0.0, -1.0]])
    found = member_weights(fitness).reshape(2, 3)
    for sign, direction in np.ndindex(2, 3):
        others = np.delete(fitness, direction, axis=1).mean()
        assert found[sign, direction] == pytest.approx(-(fitness[sign, direction] - others) / 6)
    assert found.sum() == pytest.approx(0.0, abs=1e-15)


def test_fitness_that_is_not_finite_counts_for_nothing() -> None:
    fitness = np.array([[1.0, np.nan, 2.0, 5.0], [3.0, 7.0, np.inf, -1.0]])
    found = member_weights(fitness).reshape(2, 4)
    assert (found[:, 1:3] == 0).all()
    assert (found[:, [0, 3]] == member_weights(fitness[:, [0, 3]]).reshape(2, 2)).all()
    assert np.isfinite(member_weights(np.ones((2, 4)), "zscore")).all()


@pytest.mark.parametrize("fitness", [[[np.nan, np.inf]], [[1.0, np.nan]], [[1.0], [2.0]]])
def test_without_two_directions_nothing_is_updated_and_a_warning_says_so(fitness: Any) -> None:
    with pytest.warns(RuntimeWarning, match="have finite fitness and binary layers need 2: they are not updated"):
        assert (member_weights(np.array(fitness)) == 0).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        member_weights(np.array([[1.0, 2.0]]))
