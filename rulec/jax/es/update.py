"""A step: the estimate and the rule, in one pass over leaves with independent noise and an elementwise rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rulec.es.families import is_plain
from rulec.es.perturbation import Perturbation
from rulec.jax.es.draws import CHUNK
from rulec.jax.es.elementwise import Elementwise, elementwise
from rulec.jax.es.estimate import gradient
from rulec.jax.es.fitness import Shaping, weights
from rulec.jax.es.state import Layer, State, draws, leaves


def update(
    params: Any, opt_state: Any, tx: Any, state: State, perturbation: Perturbation, fitness: Any,
    shaping: Shaping = None, *, fused: bool = True, **extra: Any,
) -> tuple[Any, Any, State, Any]:  # fmt: skip
    """New parameters, the new states of `tx` and of the strategy, and whether there was an estimate.

    `tx` is a transformation of `rulec.jax` or optax, `opt_state` its state; `fitness` and `shaping` are as for
    `estimate`. Where the last result is False, parameters and the state of `tx` are as they were. Further keywords are
    for `tx`.

    Where `tx` is elementwise, leaves with independent noise are updated part by part, and no gradient of them exists.
    Under jit their arrays must be donated for that to be in place. `fused=False` is for sharded leaves: gradients are
    made first.
    """
    weighed, ok = weights(fitness, perturbation, shaping, state.sigma)
    pairs = leaves(params, state, perturbation)
    whole = _Whole(tx, jax.tree.structure(params), jax.tree.structure((params, opt_state, ok, extra)))
    rest = jax.tree.leaves((params, opt_state, ok, extra))
    parts = fused and [_is_large(layer, perturbation) for _, layer in pairs]
    apart = None
    if parts and any(parts):
        owners = [*range(len(pairs)), *_owners(params, (params, opt_state, ok, extra))]
        apart = elementwise(whole, [*(leaf for leaf, _ in pairs), *map(jnp.asarray, rest)], owners)
    grads = [
        None if apart and parts and parts[number] else gradient(leaf, layer, state, perturbation, weighed)
        for number, (leaf, layer) in enumerate(pairs)
    ]
    estimate = _Estimate(state, perturbation, weighed)
    results = _in_parts(apart, [*grads, *rest], estimate) if apart else whole(*grads, *rest)
    params, opt_state = jax.tree.unflatten(jax.tree.structure((params, opt_state)), results)
    return params, opt_state, state.next, ok


@dataclass(frozen=True)
class _Whole:
    """A step as a function of flat arrays: gradients, and then the leaves of a tree of structure `rest`."""

    tx: Any
    params: Any
    rest: Any

    def __call__(self, *arrays: Any) -> list[Any]:
        """New parameters and the state of `tx`, or the old ones, flat."""
        count = self.params.num_leaves
        grads = jax.tree.unflatten(self.params, arrays[:count])
        params, opt_state, ok, extra = jax.tree.unflatten(self.rest, arrays[count:])
        updates, after = optax.with_extra_args_support(self.tx).update(grads, opt_state, params, **extra)
        new = optax.apply_updates(params, updates), after
        return jax.tree.leaves(jax.tree.map(lambda now, before: jnp.where(ok, now, before), new, (params, opt_state)))


@dataclass(frozen=True)
class _Estimate:
    """The arguments of the estimate of gradients."""

    state: State
    perturbation: Perturbation
    weighed: Any

    def part(self, layer: Layer, begin: Any, count: int) -> Any:
        """A part of a leaf's gradient."""
        numbers = draws(self.perturbation, self.state, layer)
        return numbers.part(self.weighed, begin, count).astype(layer.dtype)


def _is_large(layer: Layer | None, perturbation: Perturbation) -> bool:
    """Whether a leaf has noise of each element's own, and more than is made at a time."""
    return layer is not None and math.prod(layer.shape) > CHUNK and is_plain(perturbation, layer.shape)


def _owners(params: Any, tree: Any) -> list[int | None]:
    """The parameter of each leaf of a tree: of the leaf's shape, and with a path that the leaf's path ends with."""
    shapes = {path: (n, leaf.shape) for n, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(params))}

    def owner(path: tuple[Any, ...], leaf: Any) -> int | None:
        ends = (shapes.get(path[start:], (None, None)) for start in range(len(path) + 1))
        return next((number for number, shape in ends if shape == jnp.shape(leaf)), None)

    return [owner(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _in_parts(apart: Elementwise, operands: Sequence[Any], estimate: _Estimate) -> list[Any]:
    """The results of a step in which leaves are updated one by one, leaves without gradients part by part."""
    shared = apart.shared(operands)
    results: dict[int, Any] = {}
    for owner, layer in enumerate(estimate.state.layers):
        arrays = {place: operands[place] for place in apart.places(owner)}
        if layer is not None and arrays.pop(owner) is None:
            results |= _large(apart, owner, arrays, shared, layer, estimate)
        else:
            results |= apart.of_owner(owner, arrays | {owner: operands[owner]}, shared)
    return [results[place] if place in results else apart.result(place, shared) for place in range(len(apart.results))]


def _large(
    apart: Elementwise, owner: int, arrays: dict[int, Any], shared: Any, layer: Layer, estimate: _Estimate
) -> dict[int, Any]:
    """A leaf's results, made part by part in the place of their operands.

    A part is written in the turn after its own: where it is made and written at once, XLA copies the arrays.
    """
    before = len(estimate.state.layers)  # operands are gradients first, and then as results are

    def fresh(flat: dict[int, Any], begin: Any, count: int) -> dict[int, Any]:
        parts = {place: jax.lax.dynamic_slice(array, (begin,), (count,)) for place, array in flat.items()}
        parts[owner] = estimate.part(layer, begin, count)
        return {before + place: part for place, part in apart.of_owner(owner, parts, shared).items()}

    def written(flat: dict[int, Any], parts: dict[int, Any], begin: Any) -> dict[int, Any]:
        return flat | {place: jax.lax.dynamic_update_slice(flat[place], parts[place], (begin,)) for place in parts}

    def turn(number: Any, turned: tuple[Any, Any]) -> tuple[Any, Any]:
        flat = written(*turned, (number - 1) * CHUNK)
        return flat, fresh(flat, number * CHUNK, CHUNK)

    flat = {place: array.reshape(-1) for place, array in arrays.items()}
    whole, rest = divmod(math.prod(layer.shape), CHUNK)
    flat, parts = jax.lax.fori_loop(1, whole, turn, (flat, fresh(flat, 0, CHUNK)))
    flat = written(flat, parts, (whole - 1) * CHUNK)
    if rest:
        flat = written(flat, fresh(flat, whole * CHUNK, rest), whole * CHUNK)
    results = (place for place, value in enumerate(apart.results) if getattr(value, "owner", None) == owner)
    return {place: flat[before + place].reshape(layer.shape) for place in results}
