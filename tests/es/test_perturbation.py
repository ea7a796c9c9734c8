"""What a perturbation may be, and the noise of each family as a whole: its moments, and what it leaves out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rulec.errors import HyperError
from rulec.es import Perturbation, dense
from rulec.es.perturbation import FAMILIES


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"family": "lowrnak"}, "did you mean 'lowrank'"),
        ({"directions": 0}, "directions=0 must be a whole number of at least 1"),
        ({"directions": 2.0}, "directions=2.0 must be"),
        ({"family": "lowrank", "rank": 0}, "rank=0 must be"),
        ({"rank": 2}, "rank= is for the families lowrank"),
        ({"sigma": 0.0}, "without noise nothing is learnt"),
        ({"sigma": float("nan")}, "finite number above 0"),
        ({"family": "sparse"}, "needs sparsity="),
        ({"family": "permuted", "in_sparsity": 0.0}, "in_sparsity=0.0"),
        ({"family": "permuted", "out_sparsity": 2.5}, "out_sparsity=2.5"),
        ({"family": "permuted", "in_sparsity": 3, "sides": "rows"}, "in_sparsity= .* the same columns without noise"),
        ({"family": "permuted", "out_sparsity": 3, "sides": "columns"}, "out_sparsity= .* give sides='rows', 'both'"),
        ({"directions": 1, "antithetic": False}, "nothing to compare"),
        ({"family": "dropout", "keep": 0.25}, "antithetic=False"),
        ({"family": "dropout", "keep": 1.0}, "between 0 and 1"),
        ({"values": "gaussian"}, "none of normal, rademacher, popcount"),
    ],
)
def test_what_is_wrong_is_said(words: dict[str, Any], message: str) -> None:
    with pytest.raises(HyperError, match=message):
        Perturbation(**{"family": "independent", "directions": 4, **words})


def made(family: str, directions: int = 512, **words: Any) -> Perturbation:
    words = {"sparsity": 2, **words} if family == "sparse" else words
    return Perturbation(family, directions, antithetic=words.pop("antithetic", family != "dropout"), **words)  # type: ignore[arg-type]


CASES = [
    made("independent"), made("independent", values="popcount"), made("spsa", values="rademacher"), made("sparse"),
    made("permuted", sides="both"), made("permuted", in_sparsity=0.5, out_sparsity=2), made("signflip", sides="both"),
    made("lowrank", rank=2), made("lowrank", values="rademacher"),
]  # fmt: skip


@pytest.mark.parametrize("perturbation", CASES, ids=lambda p: f"{p.family}-{p.values}-{p.rank}")
def test_elements_have_variance_1_and_are_uncorrelated(perturbation: Perturbation) -> None:
    steps = range(2)
    drawn = [
        dense.noise(perturbation, (4, 6), 1, step, d).reshape(-1)
        for step in steps
        for d in range(0, perturbation.directions, 1 if perturbation.family not in ("permuted", "signflip") else 512)
    ]
    if perturbation.family in ("permuted", "signflip"):  # directions of a step share their noise: many steps instead
        drawn = [dense.noise(perturbation, (4, 6), 1, step, 0).reshape(-1) for step in range(1024)]
    found = np.stack(drawn)
    covariance = found.T @ found / len(found)
    # Fourth moments of products of two normal numbers, some scaled up where others are zero: at most 9 * 4.
    assert np.abs(covariance - np.eye(24)).max() < 7 * (36 / len(found)) ** 0.5
    assert np.abs(found.mean(axis=0)).max() < 7 / len(found) ** 0.5


def test_directions_of_a_step_differ_and_steps_differ() -> None:
    for family in FAMILIES:
        perturbation = made(family, 4)
        one = dense.noise(perturbation, (6, 40), 0, 0, 0)
        for layer, step, direction in [(1, 0, 0), (0, 1, 0), (0, 0, 1)]:
            assert not np.array_equal(one, dense.noise(perturbation, (6, 40), layer, step, direction)), family


def test_signs_differ_on_both_sides_by_default() -> None:
    """Of rows alone a layer of few outputs sees as few directions, and learns less."""
    for shape in ((10, 64), (64, 10), (8, 64, 3)):
        drawn = np.stack([dense.noise(made("signflip", 64), shape, 0, 0, d).reshape(-1) for d in range(64)])
        assert np.linalg.matrix_rank(drawn) == 64
    assert Perturbation("signflip", 4).sides_of(1, 40) == (False, True)
    assert Perturbation("signflip", 4).sides_of(40, 1) == (True, False)
    assert Perturbation("permuted", 4).sides_of(40, 40) == (True, False)


def test_sparse_noise_is_in_some_columns_only() -> None:
    found = dense.noise(made("sparse", sparsity=3), (5, 20), 0, 0, 7)
    assert int((found != 0).any(axis=0).sum()) == 3


def test_dropout_keeps_a_share_and_its_complement() -> None:
    found = dense.noise(Perturbation("dropout", 5), (3, 20), 0, 2, 1)
    assert sorted(found[0]) == [-1.0] * 10 + [1.0] * 10
    assert (found == found[0]).all()
    whole = np.stack([dense.noise(Perturbation("dropout", 4), (1, 20), 0, 2, d)[0] for d in range(4)])
    assert (whole.sum(axis=0) == 0).all()  # each input is kept by half of the directions
    with pytest.raises(HyperError, match="21 inputs have no halves"):
        dense.noise(Perturbation("dropout", 4), (3, 21), 0, 0, 0)


def test_a_gradient_along_gains_is_found_by_dropout() -> None:
    # The mean over a ring's windows and rings of what a linear fitness gives: the part of the gradient along gains.
    rng = np.random.default_rng(0)
    weight, gradient = rng.normal(size=(3, 6)), rng.normal(size=(3, 6))
    gains = np.sum(weight * gradient, axis=0)
    gains -= gains.mean()  # inputs kept are always as many: a gain common to all is not seen
    expected = weight * gains * (6 / 5) / np.sum(weight**2, axis=0)
    perturbation = Perturbation("dropout", 6)
    found = []
    for step in range(300):
        each = [dense.noise(perturbation, (3, 6), 0, step, d) for d in range(6)]
        weights = np.array([np.sum(gradient * weight * n) / 6 for n in each])
        found.append(dense.estimate(perturbation, weight, 0, step, weights))
    spread = np.std(found, axis=0) / len(found) ** 0.5
    assert (np.abs(np.mean(found, axis=0) - expected) < 7 * spread).all()


def test_vectors_have_noise_of_their_own_in_every_family() -> None:
    for family in FAMILIES:
        found = [dense.noise(made(family, 4), (50,), 3, 0, d) for d in range(2)]
        if family == "dropout":
            assert not np.any(found)
        else:
            assert not np.allclose(np.abs(found[0]), np.abs(found[1]))
