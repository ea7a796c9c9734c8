"""States between optax's containers and ours: what has a field of the same name is the same.

A state is searched for the fields that the other side needs, through tuples and named tuples; what stands around it
(chains, `inject_hyperparams`, `MultiSteps`, masks) is gone through side by side.
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
    """The state for a transformation of rulec's that goes on where a state of optax's stands.

    `state` is what optax's own function of that name keeps, version 0.2: of `optax.adamw(...)` for
    `rulec.jax.adamw(...)`, also inside of what optax wraps around either. Arrays take the dtypes that the
    transformation keeps. Where theirs has no step count, one step or more has been taken. StateMismatch where a field
    is missing or of another structure.
    """
    _check_real(params)
    return _ours(state, transformation.init(params), params)


def to_optax(state: Any, transformation: optax.GradientTransformation, params: Any) -> Any:
    """The state for a transformation of optax's that goes on where one of rulec's stands: `from_optax` the other way.

    `transformation` is optax's own; what it keeps and rulec does not, such as the `b1` of a schedule-free state, is as
    its `init` gives it.
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
        fields = _fields(theirs)
        return type(like)(**{name: _field(name, fields, own, params) for name, own in _named(like).items()})
    return _both(theirs, like, lambda a, b: _ours(a, b, params), theirs)


def _named(state: Any) -> dict[str, Any]:
    return dict(state._asdict())


def _fields(theirs: Any) -> dict[str, Any]:
    """Every field of the named tuples in a nest of tuples, the outermost of a name."""
    found: dict[str, Any] = {}
    for name, value in _every_field(theirs):
        found.setdefault(name, value)
    return found


def _every_field(theirs: Any) -> Iterator[tuple[str, Any]]:
    for name, part in zip(getattr(theirs, "_fields", ()) or range(len(theirs)), theirs, strict=True):
        if isinstance(name, str):
            yield name, part
    for part in theirs:
        if isinstance(part, tuple):
            yield from _every_field(part)


def _field(name: str, fields: Mapping[str, Any], own: Any, params: Any) -> Any:
    if name == "count":
        return jnp.full_like(own, _count(fields))
    if name not in fields:
        raise StateMismatch(
            f"the state has no {name!r} but {', '.join(fields) or 'no fields at all'}: give the state of optax's "
            f"function of the same name"
        )
    if not hasattr(own, "dtype"):
        return _like(name, fields[name], own, params)
    if jnp.ndim(own) == 1 and not hasattr(fields[name], "dtype"):
        return jnp.stack([jnp.asarray(x) for x in jax.tree.leaves(fields[name])]).astype(own.dtype)
    return jnp.asarray(fields[name]).astype(own.dtype).reshape(own.shape)


def _count(fields: Mapping[str, Any]) -> Any:
    """How many steps were taken: by the field that says it, and 1 where none does."""
    if "count" in fields:
        return fields["count"]
    return fields["step_count"] - 1 if "step_count" in fields else 1


def _like(name: str, theirs: Any, own: Any, params: Any) -> Any:
    """A tree of theirs in the dtypes of ours."""
    try:
        return jax.tree.map(lambda mine, given: jnp.asarray(given).astype(mine.dtype), own, theirs)
    except (ValueError, TypeError) as error:
        raise StateMismatch(f"{name} of the state does not have the structure of the parameters: {error}") from error


# From ours to theirs


def _theirs(like: Any, state: Any, params: Any) -> Any:
    if isinstance(state, State):
        return _filled(like, _named(state), params)
    return _both(like, state, lambda a, b: _theirs(a, b, params), state)


def _filled(like: Any, ours: Mapping[str, Any], params: Any) -> Any:
    if not isinstance(like, tuple):
        return like
    names = getattr(like, "_fields", None)
    if names is None:
        return tuple(_filled(part, ours, params) for part in like)
    return type(like)(*(_back(name, part, ours, params) for name, part in zip(names, like, strict=True)))


def _back(name: str, like: Any, ours: Mapping[str, Any], params: Any) -> Any:
    """The value of a field of theirs."""
    count = jnp.max(ours["count"])
    counts = {"count": count, "count_m2": count, "step_count": count + 1, "is_init_step": count == 0}
    if name in counts:
        return jnp.asarray(counts[name], like.dtype)
    if name not in ours:
        return _filled(like, ours, params)
    leaves, structure = jax.tree_util.tree_flatten(like)
    # A number of each parameter is one vector of ours.
    vector = hasattr(ours[name], "shape") and not hasattr(like, "shape")
    parts = list(ours[name]) if vector else jax.tree.leaves(ours[name])
    made = [jnp.asarray(mine, own.dtype).reshape(own.shape) for own, mine in zip(leaves, parts, strict=True)]
    return jax.tree_util.tree_unflatten(structure, made)


def _both(a: Any, b: Any, convert: Any, otherwise: Any) -> Any:
    """Two nests of the same containers, converted part by part; what holds no state of ours stays."""
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
