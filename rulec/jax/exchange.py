"""States between optax's containers and ours: fields of the same name hold the same values.

A state is searched for the fields of the other side, through tuples and named tuples. The containers around it
(chains, `inject_hyperparams`, `MultiSteps`, masks) are walked side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rulec.errors import StateMismatch
from rulec.jax.leaves import flat
from rulec.jax.state import State


def from_optax(state: Any, transformation: optax.GradientTransformation, params: Any) -> Any:
    """The state with which a transformation of rulec goes on from a state of optax.

    `state` is that of optax's function of the same name, version 0.2: of `optax.adamw(...)` for `rulec.jax.adamw(...)`,
    also inside of optax's wrappers around either. Arrays take the dtypes that the transformation keeps. If optax's
    state has no step count, one step or more must have been taken. StateMismatch where a field is missing or of another
    structure.
    """
    _check_real(params)
    return _ours(state, transformation.init(params), params)


def to_optax(state: Any, transformation: optax.GradientTransformation, params: Any) -> Any:
    """The state with which a transformation of optax goes on from a state of rulec: `from_optax` the other way.

    `transformation` is optax's own. Fields that rulec does not keep, such as the `b1` of a schedule-free state, are as
    in its `init`.
    """
    _check_real(params)
    return _theirs(transformation.init(params), state, params)


def _check_real(params: Any) -> None:
    flat(params, "the parameter").check_real(
        "optax keeps one second moment of a complex number, rulec one of each part"
    )


# From theirs to ours


def _ours(theirs: Any, like: Any, params: Any) -> Any:
    if isinstance(like, State):
        fields = fields_in(theirs)
        return type(like)(**{name: _field(name, fields, ours, params) for name, ours in _named(like).items()})
    return _both(theirs, like, lambda a, b: _ours(a, b, params), theirs)


def _named(state: Any) -> dict[str, Any]:
    return dict(state._asdict())


def fields_in(theirs: Any) -> dict[str, Any]:
    """Every field of the named tuples in a nest of tuples; of several with one name, the outermost."""
    fields: dict[str, Any] = {}
    for name, value in _every_field(theirs):
        fields.setdefault(name, value)
    return fields


def _every_field(theirs: Any) -> Iterator[tuple[str, Any]]:
    for name, part in zip(getattr(theirs, "_fields", ()) or range(len(theirs)), theirs, strict=True):
        if isinstance(name, str):
            yield name, part
    for part in theirs:
        if isinstance(part, tuple):
            yield from _every_field(part)


def _field(name: str, fields: Mapping[str, Any], ours: Any, params: Any) -> Any:
    if name == "count":
        return jnp.full_like(ours, count_in(fields))
    if name not in fields:
        raise StateMismatch(
            f"the state has no {name!r} but {', '.join(fields) or 'no fields at all'}: give the state of optax's "
            f"function of the same name"
        )
    if not hasattr(ours, "dtype"):
        return _like(name, fields[name], ours, params)
    if jnp.ndim(ours) == 1 and not hasattr(fields[name], "dtype"):
        return jnp.stack([jnp.asarray(x) for x in jax.tree.leaves(fields[name])]).astype(ours.dtype)
    return jnp.asarray(fields[name]).astype(ours.dtype).reshape(ours.shape)


def count_in(fields: Mapping[str, Any]) -> Any:
    """The number of steps taken: from the field with the count, and 1 where there is none."""
    for name in ("count", "t"):
        if name in fields:
            return fields[name]
    if "is_initial_step" in fields:
        return 1 - jnp.asarray(fields["is_initial_step"], jnp.int32)
    return fields["step_count"] - 1 if "step_count" in fields else 1


def _like(name: str, theirs: Any, ours: Any, params: Any) -> Any:
    """A tree of optax's in the dtypes of ours."""
    try:
        return jax.tree.map(lambda mine, array: jnp.asarray(array).astype(mine.dtype), ours, theirs)
    except (ValueError, TypeError) as error:
        raise StateMismatch(f"{name} of the state does not have the structure of the parameters: {error}") from error


# From ours to theirs


def _theirs(like: Any, state: Any, params: Any) -> Any:
    if isinstance(state, State):
        return filled(like, _named(state), params)
    return _both(like, state, lambda a, b: _theirs(a, b, params), state)


def filled(like: Any, ours: Mapping[str, Any], params: Any) -> Any:
    if not isinstance(like, tuple):
        return like
    names = getattr(like, "_fields", None)
    if names is None:
        return tuple(filled(part, ours, params) for part in like)
    return type(like)(*(_back(name, part, ours, params) for name, part in zip(names, like, strict=True)))


def _back(name: str, like: Any, ours: Mapping[str, Any], params: Any) -> Any:
    """The value of a field of optax's."""
    count = jnp.max(ours["count"])
    first = count == 0
    counts = {"count": count, "count_m2": count, "t": count, "step_count": count + 1}
    counts |= {"is_init_step": first, "is_initial_step": first}
    if name in counts:
        return jnp.asarray(counts[name], like.dtype)
    if name not in ours:
        return filled(like, ours, params)
    leaves, structure = jax.tree_util.tree_flatten(like)
    # A number of each parameter is one vector of ours.
    vector = hasattr(ours[name], "shape") and not hasattr(like, "shape")
    parts = list(ours[name]) if vector else jax.tree.leaves(ours[name])
    arrays = [jnp.asarray(mine, leaf.dtype).reshape(leaf.shape) for leaf, mine in zip(leaves, parts, strict=True)]
    return jax.tree_util.tree_unflatten(structure, arrays)


def _both(a: Any, b: Any, convert: Any, otherwise: Any) -> Any:
    """Two nests of the same containers, converted part by part; `otherwise` where neither holds a state of ours."""
    if not any(isinstance(x, State) for x in jax.tree.leaves((a, b), is_leaf=lambda x: isinstance(x, State))):
        return otherwise
    if type(a) is not type(b) or len(a) != len(b):
        raise StateMismatch(
            f"a {type(a).__name__} stands where the transformation has a {type(b).__name__}: build both alike, around "
            f"optax's function and around rulec's"
        )
    if isinstance(a, Mapping):
        return type(a)({key: convert(a[key], b[key]) for key in a})  # type: ignore[call-arg]
    parts = [convert(x, y) for x, y in zip(a, b, strict=True)]
    return type(a)(*parts) if hasattr(a, "_fields") else type(a)(parts)
