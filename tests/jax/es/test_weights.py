"""Weights of directions: the mean is of those that count, and where one is not finite there is no estimate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rulec.errors import TensorError
from rulec.es import Perturbation
from rulec.jax import es
from rulec.jax.es.state import weights


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


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("antithetic", "fitness", "directions", "dropped", "skipped"),
    [
        (True, [1.0, 2.0, 3.0, 5.0, 8.0, 1.0], 3, 0, False),
        (True, [NAN, 2.0, 3.0, 5.0, -INF, 1.0], 1, 2, False),
        (True, [NAN, 2.0, 3.0, INF, 2.0, 1.0], 2, 2, False),
        (True, [NAN, 2.0, 3.0, 1.0, INF, NAN], 0, 3, True),
        (False, [1.0, NAN, NAN], 0, 2, True),
        (False, [1.0, NAN, 3.0], 2, 1, False),
        (False, [1.0, 2.0, 4.0, 1.0, NAN, 4.0], 2, 1, False),
        (False, [3e38, -3e38, 3e38], 0, 0, True),
    ],
)
def test_a_report_says_what_counts(
    antithetic: bool, fitness: list[float], directions: int, dropped: int, skipped: bool
) -> None:
    """Traced, and beside the estimate whose second result it explains; fitness of two rows counts as their mean."""
    params, perturbation = {"w": jnp.ones((2, 3))}, Perturbation("lowrank", 3, 0.1, antithetic)
    state = es.init(params, perturbation).next

    @jax.jit
    def both(state: es.State, fitness: Any) -> Any:
        return es.report(state, perturbation, fitness), es.estimate(params, state, perturbation, fitness)[1]

    report, ok = both(state, jnp.array(fitness))
    assert [array.shape for array in report] == [()] * 4
    assert tuple(map(int, report)) == (1, directions, dropped, skipped)
    assert bool(ok) is not skipped


def test_a_report_is_that_of_the_same_shaping() -> None:
    perturbation = Perturbation("lowrank", 2)
    state = es.init({"w": jnp.ones((2, 3))}, perturbation)
    found = es.report(state, perturbation, jnp.arange(4.0), lambda given: given * jnp.inf)
    assert (bool(found.skipped), int(found.directions)) == (True, 0)
    with pytest.raises(TensorError, match="one number for each of 4 members"):
        es.report(state, perturbation, jnp.ones(3))
