"""Weights of directions: unbiased where nothing is shaped, without what is not finite, and the shapings by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rulec.errors import HyperError, TensorError
from rulec.es import Perturbation
from rulec.es import perturbation as layout
from rulec.es.fitness import ars_top, centered_rank, weights, zscore

NAN = float("nan")


def test_pairs_are_weighed_by_their_difference() -> None:
    found = weights(np.array([[3.0, 1.0], [1.0, 2.0]]), Perturbation("independent", 2, sigma=0.5))
    assert found.values.tolist() == [-1.0 / (2 * 0.5), 0.5 / (2 * 0.5)]
    assert (found.counted, found.dropped) == (2, 0)


def test_single_signs_are_weighed_against_the_others() -> None:
    found = weights(np.array([[1.0, 2.0, 6.0]]), Perturbation("independent", 3, sigma=1.0, antithetic=False))
    others = [(1 - 4.0), (2 - 3.5), (6 - 1.5)]
    assert found.values == pytest.approx([-x / 3 for x in others])


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("shaping", [None, "centered_rank", "zscore", "ars_top"])
def test_a_direction_that_is_not_finite_counts_for_nothing(bad: float, shaping: str | None) -> None:
    three = np.array([[3.0, bad, 1.0], [1.0, 5.0, 2.0]])
    found = weights(three, Perturbation("independent", 3), shaping)
    alone = weights(three[:, [0, 2]], Perturbation("independent", 2), shaping)
    assert found.values[[0, 2]] == pytest.approx(alone.values)
    assert (found.values[1], found.counted, found.dropped) == (0.0, 2, 1)


def test_nothing_is_estimated_of_nothing() -> None:
    none = weights(np.full((2, 3), NAN), Perturbation("independent", 3))
    assert none.empty
    assert none.dropped == 6
    one = weights(np.array([[1.0, NAN]]), Perturbation("independent", 2, antithetic=False))
    assert one.empty


def test_shapings_by_hand() -> None:
    fitness = np.array([[1.0, 10.0, NAN], [5.0, 5.0, NAN]])
    assert centered_rank(fitness)[:, :2].tolist() == [[-0.5, 0.5], [0.0, 0.0]]
    assert np.isnan(centered_rank(fitness)[:, 2]).all()
    known = np.array([1.0, 10.0, 5.0, 5.0])
    assert zscore(fitness)[0, 0] == pytest.approx((1 - known.mean()) / known.std())
    top = ars_top(fitness)
    assert top[:, 0].tolist() == [0.0, 0.0]
    assert top[:, 1] == pytest.approx([2.0, -2.0])  # (10 - 7.5) / 2.5, for one of two directions kept
    assert (zscore(np.ones((2, 2))) == 0).all()


def test_shaping_is_known_and_keeps_the_shape() -> None:
    fitness = np.zeros((2, 2))
    perturbation = Perturbation("independent", 2)
    with pytest.raises(HyperError, match="did you mean 'zscore'"):
        weights(fitness, perturbation, "z_score")
    with pytest.raises(TensorError, match="must keep the shape"):
        weights(fitness, perturbation, lambda f: f[0])
    assert weights(np.array([[2.0, 0], [0, 0]]), perturbation, lambda f: 0.01 * f).values.tolist() == [-0.5, 0.0]


def test_rows_of_a_batch_are_means_of_members() -> None:
    perturbation = Perturbation("independent", 2)
    rows = np.arange(12.0)  # repeats 0 to 5 of directions 0 and 1: the first three positive
    assert layout.of_members(rows, perturbation).tolist() == [[2.0, 3.0], [8.0, 9.0]]
    assert layout.of_members([1.0, 2, 3, 4], perturbation).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    with pytest.raises(TensorError, match="4 members"):
        layout.of_members([1.0, 2, 3], perturbation)


def test_batches_are_dealt_by_the_layout() -> None:
    perturbation = Perturbation("independent", 3)
    assert layout.repeats_of(12, perturbation) == 4
    assert layout.tiled(2, perturbation).tolist() == [0, 0, 0, 1, 1, 1] * 2
    with pytest.raises(TensorError, match="a batch of 7 rows cannot be dealt to 6 members"):
        layout.repeats_of(7, perturbation)
