"""What all directions' noise has in common tells one from another by its sign alone."""

from __future__ import annotations

import numpy as np
import pytest

from rulec.es import Perturbation
from rulec.es.dense import estimate
from rulec.es.fitness import weights


@pytest.mark.parametrize(("sides", "axes"), [("rows", (0,)), ("columns", (1,)), ("both", (0, 1))])
@pytest.mark.parametrize("antithetic", [True, False])
def test_permuted_noise_without_pairs_sees_no_mean_over_its_lines(
    sides: str, axes: tuple[int, ...], antithetic: bool
) -> None:
    perturbation = Perturbation("permuted", 5, 0.1, antithetic, sides=sides)  # type: ignore[arg-type]
    fitness = np.random.default_rng(0).normal(size=(perturbation.signs, 5))
    found = estimate(perturbation, np.zeros((4, 6)), 0, 0, weights(fitness, perturbation).values)
    mean = np.abs(found.mean(axes)).max()
    assert (mean > 1e-2) if antithetic else (mean < 1e-12)
    assert np.abs(found).max() > 1e-1
