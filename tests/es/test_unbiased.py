"""Without antithetic pairs the mean of estimates is the gradient, in every part of it.

Directions that share noise have something in common. It is the same in all members' fitness, from which the mean of the
others is subtracted, and would be missing from the estimate if no sign told it apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rulec.es import Perturbation
from rulec.es.dense import estimate, noise
from rulec.es.fitness import weights

Floats = np.ndarray[Any, np.dtype[np.float64]]

DIRECTIONS, STEPS = 6, 120

#: Standard errors: more than skewed means of so few show. A part that is missing is off by far more.
SIGMAS = 7

EVERYDAY: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((4, 6), {"family": "independent"}),
    ((4, 6), {"family": "sparse", "sparsity": 2}),
    ((4, 6), {"family": "lowrank", "rank": 2}),
    ((4, 6), {"family": "permuted", "sides": "rows"}),
    ((4, 6), {"family": "signflip", "sides": "both"}),
    ((4, 6), {"family": "permuted", "sides": "both", "in_sparsity": 2, "out_sparsity": 0.5}),
]
#: The others: arrays of a line, vectors, kernels, other values, and families that are another's.
SLOW: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    *(((4, 6), {"family": "permuted", "sides": sides}) for sides in ("columns", "both")),
    *(((4, 6), {"family": "signflip", "sides": sides}) for sides in ("rows", "columns")),
    ((4, 6), {"family": "permuted", "in_sparsity": 2, "out_sparsity": 0.5}),
    ((4, 6), {"family": "spsa", "values": "popcount"}),
    ((4, 6), {"family": "permuted", "values": "rademacher"}),
    ((4, 6), {"family": "permuted", "in_sparsity": 0.5}),
    ((4, 6), {"family": "permuted", "out_sparsity": 2}),
    ((3, 4, 2), {"family": "permuted", "sides": "rows"}),
    ((3, 4, 2), {"family": "signflip", "sides": "both"}),
    *((shape, {"family": f}) for f in ("permuted", "signflip") for shape in ((1, 5), (5, 1), (1, 1), (5,))),
    ((1, 5), {"family": "permuted", "sides": "rows"}),
    ((5, 1), {"family": "signflip", "sides": "columns"}),
]
CASES = [*EVERYDAY, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


def _gradient(shape: tuple[int, ...]) -> Floats:
    """One with a large part that all lines have in common."""
    return 2.0 + np.random.default_rng(1).normal(size=shape)


def _estimates(perturbation: Perturbation, weight: Floats, gradient: Floats) -> Floats:
    """Each step's estimate of the gradient of a linear loss, whose noise of dropout is what multiplies the weight."""
    found = []
    for step in range(STEPS):
        each = [noise(perturbation, weight.shape, 2, step, d) for d in range(perturbation.directions)]
        moved = [weight * n if perturbation.family == "dropout" else perturbation.sigma * n for n in each]
        fitness = -np.array([[np.sum(gradient * (weight + m)) for m in moved]])
        found.append(estimate(perturbation, weight, 2, step, weights(fitness, perturbation).values))
    return np.stack(found)


def _parts(arrays: Floats) -> Floats:
    """Elements, means of lines and the mean of all, of each of some arrays: (arrays, parts)."""
    axes = range(1, arrays.ndim)
    means = [arrays.mean(axis) for axis in (*axes, tuple(axes))]
    return np.concatenate([part.reshape(len(arrays), -1) for part in (arrays, *means)], axis=1)


def _is_mean(found: Floats, expected: Floats) -> bool:
    """Whether all parts of the mean are what is expected, within their own standard errors."""
    parts = _parts(found)
    error = parts.std(axis=0, ddof=1) / len(parts) ** 0.5
    return bool((np.abs(parts.mean(axis=0) - _parts(expected[None])[0]) < SIGMAS * error).all())


@pytest.mark.parametrize(("shape", "words"), CASES, ids=str)
def test_the_mean_of_estimates_is_the_gradient(shape: tuple[int, ...], words: dict[str, Any]) -> None:
    perturbation = Perturbation(directions=DIRECTIONS, sigma=0.1, antithetic=False, seed=3, **words)
    gradient = _gradient(shape)
    assert _is_mean(_estimates(perturbation, np.zeros(shape), gradient), gradient)


def test_the_mean_of_estimates_by_dropout_is_the_gradient_along_gains() -> None:
    """Of gains less their mean: as many inputs are kept in all members. Windows that meet end to end sum to nothing."""
    columns = 6
    weight, gradient = np.random.default_rng(5).normal(size=(4, columns)), _gradient((4, columns))
    gains = np.sum(weight * gradient, axis=0)
    seen = (gains - gains.mean()) * columns / (columns - 1) * DIRECTIONS / (DIRECTIONS - 1)
    perturbation = Perturbation("dropout", DIRECTIONS, antithetic=False, keep=1 / 3)
    assert _is_mean(_estimates(perturbation, weight, gradient), weight * seen / np.sum(weight**2, axis=0))
