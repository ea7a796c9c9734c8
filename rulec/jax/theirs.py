"""Transformations that compute by a rule and keep the state of optax's own function.

Their `init` is optax's. An update reads the values of the rule from the fields of that state, and writes them back. So
a state of optax goes on here, and one from here goes on there, without a conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rulec.jax.exchange import count_in, fields_in, filled
from rulec.jax.leaves import flat

#: A tree and the parameters, to another tree.
Move = Callable[[Any, Any], Any]


def _same(tree: Any, params: Any) -> Any:
    return tree


@dataclass(frozen=True)
class FieldMap:
    """How the states of a rule lie in the fields of optax's state.

    `read` gives the states of the rule by name, from the fields of optax's state and the parameters; `write` gives
    the fields from the state of the rule. `view` gives a tree of optax's as the rule sees it, and `back` the inverse.
    """

    read: Callable[[Mapping[str, Any], Any], Mapping[str, Any]]
    write: Callable[[Any, Any], Mapping[str, Any]]
    view: Move = _same
    back: Move = _same


def renamed(**fields: str) -> FieldMap:
    """The fields where each state of the rule is a field of another name and the same shapes."""
    return FieldMap(
        lambda known, params: {name: known[field] for name, field in fields.items()},
        lambda new, params: {field: getattr(new, name) for name, field in fields.items()},
    )


def with_state_of(
    other: optax.GradientTransformation,
    ours: Callable[[Any, Any], optax.GradientTransformationExtraArgs],
    fields: FieldMap,
) -> optax.GradientTransformationExtraArgs:
    """The transformation with the state of `other`, and the updates of `ours`.

    `ours` gives the transformation of a rule, from the parameters and the number of steps before this one.
    """

    def init(params: Any) -> Any:
        check_real(params)
        return other.init(params)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        tree = grads if params is None else params
        check_real(tree)
        known = fields_in(state)
        count = count_in(known)
        transformation = ours(tree, count)
        seen = fields.view(tree, tree)
        mine = state_of(transformation, seen, count, fields.read(known, tree))
        updates, new = transformation.update(fields.view(grads, tree), mine, None if params is None else seen, **extra)
        return fields.back(updates, tree), filled(state, {"count": new.count, **fields.write(new, tree)}, tree)

    return optax.GradientTransformationExtraArgs(init, update)


def check_real(params: Any) -> None:
    """TensorError for complex parameters."""
    flat(params, "the parameter").check_real("the states of this function are optax's, which has real ones")


def state_of(transformation: optax.GradientTransformation, params: Any, count: Any, values: Mapping[str, Any]) -> Any:
    """The state of a rule with these values, in its dtypes."""
    empty = jax.eval_shape(transformation.init, params)
    fields = {name: _like(values[name], part) for name, part in empty._asdict().items() if name != "count"}
    return empty._replace(count=jnp.full(empty.count.shape, count, empty.count.dtype), **fields)


def _like(value: Any, model: Any) -> Any:
    return jax.tree.map(lambda leaf, part: jnp.asarray(part).astype(leaf.dtype).reshape(leaf.shape), model, value)


def by_leaf(function: Callable[..., Any], *trees: Any) -> Any:
    """A tree like the first, of a function of the leaves of all; the others may have anything in place of a leaf."""
    structure: Any
    leaves, structure = jax.tree.flatten(trees[0])
    rest: Sequence[Any] = [structure.flatten_up_to(tree) for tree in trees[1:]]
    return structure.unflatten([function(*parts) for parts in zip(leaves, *rest, strict=True)])
