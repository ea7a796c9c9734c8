"""The state of an evolution strategy in JAX, the perturbed leaves of a tree, and the weights of directions.

The weights follow from traced fitness, as in `rulec.es.fitness`; no shape depends on the numbers. The report of an
update is arrays: it says how many members' fitness counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rulec.errors import HyperError, TensorError
from rulec.es.families import Family, family
from rulec.es.fitness import worse
from rulec.es.perturbation import Perturbation, of_members, places, warn_of_lost_noise
from rulec.jax.es.draws import JaxDraws
from rulec.jax.leaves import called, leaf_name


@dataclass(frozen=True)
class Layer:
    """A perturbed leaf: its path, its number among the perturbed ones, its shape and its dtype."""

    name: str
    number: int
    shape: tuple[int, ...]
    dtype: str


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The number of updates, the seed and sigma: three arrays. The layers belong to the tree's structure.

    `sigma` is the factor of noise in the next step (1 for dropout), whatever the perturbation has.
    """

    step: Any
    seed: Any
    sigma: Any
    layers: tuple[Layer | None, ...] = field(metadata={"static": True})
    perturbation: Perturbation = field(metadata={"static": True})

    @property
    def next(self) -> State:
        """The state after an update."""
        return replace(self, step=self.step + 1)


def init(params: Any, perturbation: Perturbation, mask: Any = None) -> State:
    """The state before the first step.

    Every leaf of floating-point numbers with a dimension or more is perturbed, unless `mask`, a tree of the parameters'
    structure or a prefix of it, has False there. Leaves of two dimensions and more, (*window, inputs, outputs), have
    the family's noise; vectors have independent noise, and with the dropout family none. Shapes may stand for arrays.
    TensorError where nothing is left to perturb; a RuntimeWarning where arrays that are there, not traced, are too
    large or of too few bits for noise to move them.
    """
    chosen = _chosen(params, mask)
    layers: list[Layer | None] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        number = sum(layer is not None for layer in layers)
        layers.append(_layer(leaf_name(path), number, leaf, perturbation) if chosen[len(layers)] else None)
    if not any(layers):
        raise TensorError("no leaf of the parameters is perturbed: give floating-point arrays that the mask leaves")
    perturbed = [leaf for leaf, layer in zip(jax.tree.leaves(params), layers, strict=True) if layer]
    warn_of_lost_noise(perturbation, [(_sample(leaf), str(leaf.dtype)) for leaf in perturbed if _is_there(leaf)])
    seed, sigma = jnp.asarray(perturbation.seed_or_0, jnp.uint32), jnp.asarray(perturbation.size, float)
    return State(jnp.zeros((), jnp.uint32), seed, sigma, tuple(layers), _without_sigma(perturbation))


def set_sigma(state: State, perturbation: Perturbation, sigma: Any) -> State:
    """The state with another scale of noise, a number or an array of one, for the members of the next step.

    `estimate` and `update` are of members of the same state: give it to all functions of a step, or to none of them.
    HyperError for a bad sigma, and for dropout, which has none.
    """
    if perturbation.family == "dropout" or not isinstance(sigma, jax.Array | np.ndarray):
        perturbation.with_sigma(sigma)
    elif jnp.shape(sigma) != ():
        raise HyperError(f"sigma has shape {jnp.shape(sigma)}: it must be one number")
    elif not isinstance(sigma, jax.core.Tracer):
        perturbation.with_sigma(float(sigma))
    return replace(state, sigma=jnp.asarray(sigma, state.sigma.dtype))


def _chosen(params: Any, mask: Any) -> list[bool]:
    if mask is None:
        return [True] * len(jax.tree.leaves(params))
    try:
        spread = jax.tree.map(lambda kept, below: jax.tree.map(lambda _: bool(kept), below), mask, params)
    except ValueError as error:
        raise TensorError(
            f"the mask is {jax.tree.structure(mask)}, which is no prefix of the parameters: give it their structure"
        ) from error
    return jax.tree.leaves(spread)


def _layer(name: str, number: int, leaf: Any, perturbation: Perturbation) -> Layer | None:
    least = 2 if perturbation.family == "dropout" else 1
    if not hasattr(leaf, "dtype") or leaf.ndim < least or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return None
    if leaf.ndim > 1 and perturbation.family == "dropout":
        perturbation.kept_of(leaf.shape[-2])
    return Layer(name, number, tuple(leaf.shape), str(leaf.dtype))


def _is_there(leaf: Any) -> bool:
    """Whether the elements of a leaf can be looked at here and now."""
    if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array):
        return isinstance(leaf, np.ndarray) and leaf.size > 0
    return leaf.size > 0 and leaf.is_fully_addressable and not leaf.is_deleted()


def _sample(leaf: Any) -> Any:
    """Elements of a leaf, in float64 on the host, also while something else is traced."""
    with jax.ensure_compile_time_eval():
        return jax.device_get(leaf[np.unravel_index(places(leaf.size), leaf.shape)]).astype(np.float64)


def _without_sigma(perturbation: Perturbation) -> Perturbation:
    """The part of a perturbation in the tree's structure: the state has its sigma as an array."""
    return replace(perturbation, sigma=1.0)


def check(state: State, perturbation: Perturbation) -> None:
    """HyperError where the perturbation is not that of `init`, except for its sigma."""
    before, now = state.perturbation.as_dict(), _without_sigma(perturbation).as_dict()
    for name in before:
        if before[name] != now[name]:
            raise HyperError(
                f"the perturbation has {name}={now[name]!r}, and had {before[name]!r} when es.init was called: give "
                f"the same to all functions"
            )


def leaves(
    params: Any, state: State, perturbation: Perturbation, what: str = "the parameter"
) -> list[tuple[Any, Layer | None]]:
    """The leaves of a tree with their layers.

    TensorError for another tree than the state's, HyperError for another perturbation.
    """
    check(state, perturbation)
    arrays = jax.tree.leaves(params)
    if len(arrays) != len(state.layers):
        raise TensorError(
            f"the tree has {len(arrays)} leaves, and had {len(state.layers)} when es.init was called: call it again"
        )
    for leaf, layer in zip(arrays, state.layers, strict=True):
        if layer is not None and (tuple(leaf.shape), str(leaf.dtype)) != (layer.shape, layer.dtype):
            raise TensorError(
                f"{called(what, layer.name)} is {leaf.dtype}{list(leaf.shape)}, and was {layer.dtype}"
                f"{list(layer.shape)} when es.init was called: call it again"
            )
    return list(zip(arrays, state.layers, strict=True))


def wide(dtype: Any) -> Any:
    """The dtype that noise is summed in."""
    return jnp.promote_types(dtype, jnp.float32)


def draws(perturbation: Perturbation, state: State, layer: Layer, dtype: Any = None) -> JaxDraws:
    """The random numbers of a layer, by default in the dtype that they are summed in."""
    noise_dtype = wide(layer.dtype) if dtype is None else jnp.dtype(dtype)
    return JaxDraws(perturbation.values, state.seed, layer.number, state.step, perturbation.directions, noise_dtype)


def noise_of(perturbation: Perturbation, state: State, layer: Layer, dtype: Any = None) -> Family:
    """The noise of a layer: its family's, or of a vector's own elements."""
    numbers = draws(perturbation, state, layer, dtype)
    return family(perturbation, layer.shape, numbers, state.sigma.astype(numbers.dtype))


class Report(NamedTuple):
    """The update of one step, by number from 0: arrays of one number each.

    `directions` counted; `dropped` members had no finite fitness. If too few were left, or weights were not finite,
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
