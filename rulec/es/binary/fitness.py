"""Weights of members, for estimates that know each member's own score and not only the difference of a pair."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from rulec.es.fitness import Shaping, shape_fitness

Floats = np.ndarray[Any, np.dtype[np.float64]]


def member_weights(fitness: Floats, shaping: Shaping = None) -> Floats:
    """Weights (members,) of sum zero from fitness by (sign, direction), which is to be maximised.

    A member's weight is minus its fitness, less the mean fitness of all other directions, over the number of members.
    The baseline does not depend on the member, so that the estimate has no bias. Directions with fitness that is not
    finite count for nothing. Where fewer than two are left there is no baseline, all weights are 0 and a RuntimeWarning
    says so.
    """
    whole = np.isfinite(fitness).all(axis=0)
    count = int(whole.sum())
    if count < 2:
        warnings.warn(
            f"{count} of {whole.size} directions have finite fitness and binary layers need 2: they are not updated",
            RuntimeWarning, stacklevel=2,
        )  # fmt: skip
        return np.zeros(fitness.size)
    scores = np.where(whole, shape_fitness(np.where(whole, fitness, np.nan), shaping), 0.0)
    signs = len(fitness)
    baseline = (scores.sum() - scores.sum(axis=0)) / (signs * (count - 1))
    return np.where(whole, (baseline - scores) / (signs * count), 0.0).reshape(-1)
