"""GaLore as optax.contrib has it: any transformation on gradients that are projected to leading singular vectors.

The vectors are those of JAX, with the signs of its SVD: the moments of the inner transformation outlive a projection,
so their numbers are optax's with no other signs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import GaLoreDimensionNumbers

from rulec.errors import HyperError, TensorError
from rulec.jax.built import BUILT, built
from rulec.jax.drop_ins import function_named
from rulec.jax.theirs import check_real
from rulec.jax.views import View, view_of


@dataclass(frozen=True)
class _Low:
    """A leaf as a matrix, and the rank of its projection."""

    view: View
    rank: int

    @property
    def left(self) -> bool:
        """Whether the rows are projected: those of a tall or square matrix."""
        rows, cols = self.view.sides
        return rows >= cols

    def vectors(self, grad: Any) -> Any:
        """The leading singular vectors of a gradient, in its dtype; computed in float32, as optax's."""
        u, _, vh = jnp.linalg.svd(self.view.of(grad).astype(jnp.float32), full_matrices=False)
        rank = min(self.rank, *self.view.sides)
        return (u[:, :rank] if self.left else vh[:rank, :].T).astype(grad.dtype)

    def projected(self, grad: Any, vectors: Any) -> Any:
        """The gradient in the space of the vectors."""
        matrix = self.view.of(grad)
        return vectors.T @ matrix if self.left else matrix @ vectors

    def back(self, low: Any, vectors: Any) -> Any:
        """The way back to the shape of the leaf."""
        return self.view.back(vectors @ low if self.left else low @ vectors.T)


def _is_word(x: Any) -> bool:
    return x is None or isinstance(x, GaLoreDimensionNumbers)


def _plans(dimensions: Any, rank: int, params: Any) -> Any:
    """A list of a projection, or None, for each leaf."""
    if callable(dimensions):
        dimensions = dimensions(params)
    elif dimensions is None:
        dimensions = jax.tree.map(lambda p: GaLoreDimensionNumbers() if p.ndim == 2 else None, params)
    if _is_word(dimensions):
        one = dimensions
        dimensions = jax.tree.map(lambda p: one if p.ndim >= 2 else None, params)
    leaves = jax.tree.leaves(params)
    words = jax.tree.leaves(dimensions, is_leaf=_is_word)
    if len(words) != len(leaves):
        raise TensorError(
            f"weight_dimension_numbers has {len(words)} entries, and there are {len(leaves)} leaves: give "
            f"GaLoreDimensionNumbers or None for each"
        )
    return [None if word is None else _Low(_whole(leaf, word), rank) for leaf, word in zip(leaves, words, strict=True)]


def _whole(leaf: Any, word: Any) -> View:
    view = view_of(leaf.shape, word, "the axes of GaLoreDimensionNumbers")
    if view.batch:
        raise TensorError(
            f"GaLoreDimensionNumbers leave out the axes {view.batch} of a leaf of shape {view.shape}: give every axis"
        )
    return view


def _projecting(name: str, values: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    rank = values["rank"]
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise HyperError(
            f"rulec.jax.{name} has rank={rank!r}, which decides what is compiled: give a whole number of Python from 1 "
            f"on, and under inject_hyperparams name it among the static_args"
        )
    base, dimensions = values["base_optimizer"], values["weight_dimension_numbers"]
    base = function_named("scale_by_adam")() if base is None else base
    keywords = ("rank", "update_proj_gap", "scale", "weight_dimension_numbers")
    theirs = BUILT["contrib.scale_by_galore"].theirs(**{key: values[key] for key in keywords}, base_optimizer=base)

    def init(params: Any) -> Any:
        check_real(params)
        _plans(dimensions, rank, params)
        return theirs.init(params)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        check_real(grads)
        structure: Any
        leaves, structure = jax.tree.flatten(grads)
        plans = _plans(dimensions, rank, grads)
        due = state.count % values["update_proj_gap"] == 0
        vectors = [
            old if plan is None else jax.lax.cond(due, plan.vectors, lambda _, old=old: old, grad)
            for plan, grad, old in zip(plans, leaves, structure.flatten_up_to(state.projector), strict=True)
        ]
        parts = zip(plans, leaves, vectors, strict=True)
        low = [grad if plan is None else plan.projected(grad, v) for plan, grad, v in parts]
        moves, inner = base.update(structure.unflatten(low), state.base_optimizer_state, None)
        whole = [
            move if plan is None else (values["scale"] * plan.back(move, v)).astype(grad.dtype)
            for plan, grad, move, v in zip(plans, leaves, structure.flatten_up_to(moves), vectors, strict=True)
        ]
        count, projector = optax.safe_increment(state.count), structure.unflatten(vectors)
        return structure.unflatten(whole), state._replace(count=count, base_optimizer_state=inner, projector=projector)

    return optax.GradientTransformationExtraArgs(init, update)


@built("contrib.scale_by_galore", "galore", "as `galore`")
def scale_by_galore(values: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """The updates of a transformation on gradients that are projected to their leading singular vectors."""
    return _projecting("contrib.scale_by_galore", values)


@built("contrib.galore", "galore", "singular vectors are float32, with the signs of JAX; any inner transformation")
def galore(values: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """Adam, or another transformation, on the gradient's projection to its leading singular vectors."""
    return optax.chain(
        _projecting("contrib.galore", values),
        optax.add_decayed_weights(values["weight_decay"], values["mask"]),
        optax.scale_by_learning_rate(values["learning_rate"]),
    )
