"""The report of an update, as arrays: how many members' fitness counts."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from rulec.es.perturbation import Perturbation
from rulec.jax.es.fitness import Shaping, by_member, weights
from rulec.jax.es.state import State, check


class Report(NamedTuple):
    """The update of one step, by number from 0: arrays of one number each.

    `directions` counted; `dropped` members had no finite fitness. Where too few were left, or weights were not finite,
    the step was `skipped`: nothing was estimated.
    """

    step: Any
    directions: Any
    dropped: Any
    skipped: Any


def report(state: State, perturbation: Perturbation, fitness: Any, shaping: Shaping = None) -> Report:
    """The report of `estimate` or `update` with this fitness in the next step: one call beside theirs.

    Errors are those of `estimate`.
    """
    check(state, perturbation)
    values, (_, ok) = by_member(fitness, perturbation), weights(fitness, perturbation, shaping, state.sigma)
    finite = jnp.isfinite(values)
    return Report(state.step, jnp.where(ok, finite.all(axis=0).sum(), 0), (~finite).sum(), ~ok)
