"""The weights of directions from traced fitness, as in `rulec.es.fitness`; no shape depends on the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from rulec.es.fitness import TOP, shaped_by
from rulec.es.layout import of_members
from rulec.es.perturbation import Perturbation

#: Takes fitness by (sign, direction), NaN where a direction does not count, and gives as many numbers.
Shaping = str | Callable[[Any], Any] | None


def by_member(fitness: Any, perturbation: Perturbation) -> Any:
    """Fitness by (sign, direction), of members or of the rows of their batch; TensorError for another length."""
    values = jnp.asarray(fitness)
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    shape = perturbation.signs, perturbation.directions
    of_members(np.broadcast_to(0.0, values.shape), perturbation)  # raises what is wrong with the shape
    if values.shape == shape:
        return values
    return values.reshape(shape[0], -1, shape[1]).mean(axis=1)


def weights(fitness: Any, perturbation: Perturbation, shaping: Shaping = None, sigma: Any = None) -> tuple[Any, Any]:
    """The factor of each direction's noise, (directions,), and whether enough directions count and all are finite.

    `sigma` is the factor of the members' noise, by default the perturbation's.
    """
    fitness = by_member(fitness, perturbation)
    whole = jnp.isfinite(fitness).all(axis=0)
    counted = whole.sum()
    ok = counted >= (1 if perturbation.antithetic else 2)
    shaped = shaped_by(jnp.where(whole, fitness, jnp.nan), shaping, SHAPINGS, jnp.asarray)
    score = _contrast(shaped, whole, perturbation.antithetic)
    size = perturbation.size if sigma is None else sigma.astype(score.dtype)
    factors = jnp.where(whole & ok, -score / (counted * size), 0.0)
    ok = ok & jnp.isfinite(factors).all()
    return jnp.where(ok, factors, 0.0), ok


def _contrast(shaped: Any, whole: Any, antithetic: bool) -> Any:
    if antithetic:
        return shaped[0] / 2 - shaped[1] / 2
    counted = whole.sum()
    return (shaped[0] - jnp.mean(shaped[0], where=whole)) * (counted / (counted - 1))


def centered_rank(fitness: Any) -> Any:
    """Ranks from -1/2 to 1/2; equal ones share the mean of theirs."""
    flat = fitness.reshape(-1)
    ordered = jnp.sort(flat)
    first, after = (jnp.searchsorted(ordered, flat, side=side) for side in ("left", "right"))
    last = jnp.maximum(1, (~jnp.isnan(flat)).sum() - 1)
    ranks = (first + after - 1) / 2 / last - 0.5
    return jnp.where(jnp.isnan(flat), jnp.nan, ranks).reshape(fitness.shape)


def zscore(fitness: Any) -> Any:
    """Fitness less its mean, in standard deviations."""
    return _over(fitness - jnp.nanmean(fitness), jnp.nanstd(fitness))


def ars_top(fitness: Any) -> Any:
    """Fitness of the best directions, in its standard deviations, weighed as if there were no others."""
    best = jnp.max(fitness, axis=0)
    there = (~jnp.isnan(best)).sum()
    place = jnp.argsort(jnp.argsort(-best, stable=True), stable=True)
    count = jnp.maximum(1, jnp.round(TOP * there))
    chosen = jnp.where(place < count, fitness, jnp.nan)
    scores = _over(chosen - jnp.nanmean(chosen), jnp.nanstd(chosen)) * (there / count)
    return jnp.where(jnp.isnan(fitness), jnp.nan, jnp.where(place < count, scores, 0.0))


def _over(numbers: Any, spread: Any) -> Any:
    return jnp.where(spread > 0, numbers / jnp.where(spread > 0, spread, 1.0), numbers * 0.0)


SHAPINGS: dict[str, Callable[[Any], Any]] = {"centered_rank": centered_rank, "zscore": zscore, "ars_top": ars_top}
