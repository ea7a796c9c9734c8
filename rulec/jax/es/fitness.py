"""The weights of directions from traced fitness, as in `rulec.es.fitness`; no shape depends on the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from rulec.es.fitness import worse
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
    counted = jnp.isfinite(fitness).all(axis=0).sum()
    ok = counted >= (1 if perturbation.antithetic else 2)
    scores = worse(fitness, perturbation, shaping, jnp)
    size = perturbation.size if sigma is None else sigma.astype(scores.dtype)
    factors = jnp.where(ok, scores / (counted * size), 0.0)
    ok = ok & jnp.isfinite(factors).all()
    return jnp.where(ok, factors, 0.0), ok
