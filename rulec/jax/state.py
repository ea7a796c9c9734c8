"""The state of a rule as users see it: a named tuple of the step count, and a tree or a number for each state."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from rulec.backend.printer import unique_name
from rulec.compiler.layout import ITEM_SIZE
from rulec.errors import StateMismatch
from rulec.jax.leaves import Tree
from rulec.jax.packing import Packed, Pieces
from rulec.jax.pairs import paired
from rulec.jax.plan import StepPlan
from rulec.jax.values import Values
from rulec.language.rule import Rule


class State:
    """What a rule remembers: `count`, how many steps were done, and its states by name.

    A state of the leaves is a tree like the parameters, with None for a leaf that does not have it; one that is a
    number is a vector over the leaves that have it or over the groups, or a single number of the whole model. It is a
    named tuple, so a pytree of arrays; `count` is int32, and a vector where a rule may skip the steps of some leaves
    alone.
    """

    __slots__ = ()


@functools.cache
def state_class(fields: tuple[str, ...]) -> Any:
    """The class of states with these fields; the same for the same fields, so that structures are equal."""
    base: Any = namedtuple("State", [*fields])  # type: ignore[misc]
    body = {"__slots__": (), "__reduce__": _reduce, "__module__": __name__, "__doc__": State.__doc__}
    return type("State", (State, base), body)


def _reduce(self: Any) -> Any:
    return _made, (self._fields, tuple(self))


def _made(fields: tuple[str, ...], values: Sequence[Any]) -> Any:
    return state_class(fields)(*values)


@dataclass(frozen=True)
class Fields:
    """The fields of a state: for each state of a recipe's rules its field, those of trees and those of numbers."""

    arrays: Mapping[str, str]
    numbers: Mapping[str, str]

    @property
    def every(self) -> dict[str, str]:
        """All of them."""
        return {**self.arrays, **self.numbers}

    def packed(self, values: Values, tree: Tree) -> Any:
        """Values as users see them."""
        places = range(len(tree.arrays))
        found: dict[str, Any] = {}
        for name, field in self.arrays.items():
            arrays = values.arrays.get(name, {})
            if isinstance(arrays, Pieces):
                found[field] = arrays.packed()
            else:
                found[field] = tree.of([arrays.get(place) for place in places])
        # Of no leaves, as optax asks where parameters stand in a state, numbers still stand where they do.
        none = None if tree.arrays else jnp.zeros(())
        found |= {field: values.numbers.get(name, none) for name, field in self.numbers.items()}
        return state_class(("count", *self.every.values()))(count=values.count, **found)

    def unpacked(self, state: Any, tree: Tree, title: str) -> Values:
        """The values of a state; StateMismatch where it is not of these parameters and this rule."""
        for field in ("count", *self.every.values()):
            if not hasattr(state, field):
                raise StateMismatch(
                    f"the state is a {type(state).__name__} without {field!r}, which {title} needs: give what its init "
                    f"returned"
                )
        values = Values(state.count)
        for name, field in self.arrays.items():
            values.arrays[name] = _by_place(getattr(state, field), field, tree, title)
        for name, field in self.numbers.items():
            if getattr(state, field) is not None:
                values.numbers[name] = getattr(state, field)
        return values


def _by_place(found: Any, field: str, tree: Tree, title: str) -> dict[int, Any]:
    if isinstance(found, Packed):
        return Pieces(_by_place(found.pieces(), field, tree, title), found)
    try:
        arrays = tree.structure.flatten_up_to(found)
    except (ValueError, TypeError) as error:
        raise StateMismatch(
            f"{field} of the state of {title} does not have the structure of the parameters, which may have changed "
            f"since init: {error}"
        ) from error
    made = {
        place: paired(array) if place in tree.paired else array
        for place, array in enumerate(arrays)
        if array is not None
    }
    for place, array in made.items():
        if str(getattr(array, "dtype", None)) not in ITEM_SIZE:
            kind = array.dtype if hasattr(array, "dtype") else type(array).__name__
            raise StateMismatch(
                f"{field} of {tree.names[place]} in the state of {title} is of {kind}, and states are of "
                f"{', '.join(ITEM_SIZE)}: give what init returned"
            )
    return made


def check_state(plan: StepPlan, values: Values, fields: Fields, title: str) -> None:
    """StateMismatch where a state lacks what the plan needs, or has it in another shape."""
    of = f"of the state of {title}"
    advice = "the parameters or the rule may have changed since init"
    for bucket in plan.buckets:
        for spec, place, _, shape in bucket.state_shapes():
            found = values.arrays.get(spec.name, {}).get(place)
            what = f"{fields.every[spec.name]} of {plan.leaves[place].name}"
            if found is None:
                raise StateMismatch(f"there is no {what} in the state of {title}: {advice}")
            if tuple(found.shape) != shape:
                raise StateMismatch(f"{what} in the state of {title} has shape {found.shape} and not {shape}: {advice}")
    for name, level in plan.numbers.items():
        shape = {"tensor": (len(plan.having[name]),), "group": (plan.groups,), "model": ()}[level]
        if tuple(getattr(values.numbers.get(name), "shape", (-1,))) != shape:
            raise StateMismatch(f"{fields.every[name]} {of} is not an array of shape {shape}: {advice}")
    shape = (len(plan.leaves),) if plan.own_counts else ()
    if tuple(getattr(values.count, "shape", (-1,))) != shape or values.count.dtype.kind not in "iu":
        raise StateMismatch(f"the count {of} is not an array of whole numbers of shape {shape}: {advice}")


def fields_of(rules: Sequence[Rule], renamed: Mapping[str, str]) -> Fields:
    """The fields of the states of these rules: their names as identifiers, or those of `renamed`."""
    taken = {"count", "index"}
    levels = {name: state.per for rule in rules for name, state in rule.state.items() if state.shape is None}
    names = {name: None for rule in rules for name in rule.state}
    made = {name: unique_name(renamed.get(name, name), taken) for name in names}
    return Fields(
        {name: field for name, field in made.items() if levels.get(name) not in _NUMBERS},
        {name: field for name, field in made.items() if levels.get(name) in _NUMBERS},
    )


#: The levels of states that are numbers.
_NUMBERS = ("tensor", "group", "model")
