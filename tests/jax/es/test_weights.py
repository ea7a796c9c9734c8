"""Weights of directions: the mean is of those that count, and where one is not finite there is no estimate."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from rulec.es import Perturbation
from rulec.jax.es.fitness import weights


def test_what_a_shaping_makes_of_dropped_members_is_no_part_of_the_mean() -> None:
    perturbation = Perturbation("independent", 4, antithetic=False)
    fitness = jnp.array([1.0, jnp.nan, 3.0, 8.0])
    plain, _ = weights(fitness, perturbation)
    other, ok = weights(fitness, perturbation, lambda given: jnp.nan_to_num(given, nan=1e3))
    np.testing.assert_array_equal(plain, other)
    assert ok


@pytest.mark.parametrize("antithetic", [True, False])
def test_weights_that_are_not_finite_are_no_estimate(antithetic: bool) -> None:
    perturbation = Perturbation("independent", 2, antithetic=antithetic)
    fitness = jnp.array([3e38, -3e38, -3e38, 3e38][: perturbation.members])
    found, ok = weights(fitness, perturbation)
    assert not ok
    assert found.tolist() == [0.0, 0.0]
    found, ok = weights(fitness / 1e30, perturbation, lambda given: given * jnp.nan)
    assert not ok
    assert found.tolist() == [0.0, 0.0]
