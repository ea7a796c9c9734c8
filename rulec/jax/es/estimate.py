"""The estimate of a gradient from the fitness of members."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rulec.es.perturbation import Perturbation
from rulec.jax.es.fitness import Shaping, weights
from rulec.jax.es.state import Layer, State, leaves, noise_of


def estimate(
    params: Any, state: State, perturbation: Perturbation, fitness: Any, shaping: Shaping = None
) -> tuple[Any, Any]:
    """The gradient of minus the fitness, a tree like the parameters, and whether there is one.

    `fitness` has one number for each member, positive signs first, or for each row of `member_batch`; the more the
    better. Without `shaping` (`centered_rank`, `zscore`, `ars_top` or a function of an array (signs, directions)) the
    mean of the estimate is the gradient of the smoothed fitness. Directions with a member whose fitness is not finite
    count for nothing; where too few are left the gradient is zero and the second result False. TensorError for fitness
    of another length.
    """
    weighed, ok = weights(fitness, perturbation, shaping, state.sigma)
    gradients = [
        gradient(leaf, layer, state, perturbation, weighed) for leaf, layer in leaves(params, state, perturbation)
    ]
    return jax.tree.unflatten(jax.tree.structure(params), gradients), ok


def gradient(leaf: Any, layer: Layer | None, state: State, perturbation: Perturbation, weighed: Any) -> Any:
    """The gradient of one leaf from the weights of directions; zero for one that is not perturbed."""
    if layer is None:
        return jnp.zeros_like(leaf)
    noise = noise_of(perturbation, state, layer)
    return noise.estimate(weighed, leaf).astype(leaf.dtype)
