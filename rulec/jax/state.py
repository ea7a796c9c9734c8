"""The state of a rule as users see it: a named tuple of the step count, and a tree or a number for each state."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rulec.backend.printer import unique_name
from rulec.compiler.layout import FLOATS
from rulec.compiler.weights import PARTS
from rulec.errors import StateMismatch
from rulec.functional.init import CHANGED, check_values, number_states
from rulec.functional.plan import StepPlan
from rulec.functional.quantized import Coded, Unbiased
from rulec.functional.values import Values
from rulec.jax.leaves import Tree, paired
from rulec.jax.packing import STATISTICS, Packed, Pieces
from rulec.language.rule import Rule

jax.tree_util.register_dataclass(Coded, ["codes", "scales"], ["format"])
jax.tree_util.register_dataclass(Unbiased, ["values"], [])


class State:
    """The memory of a rule: `count`, the number of steps done, and its states by name.

    A state of the leaves is a tree like the parameters, with None for a leaf without it, `codes`, `scales` and their
    `format` together for a leaf in codes, and `values` for a leaf in bfloat16_sr. A state of numbers is a vector over
    the leaves with it or over the groups, or a single number of the whole model. It is a named tuple, so a pytree of
    arrays. `count` is int32; it is a vector where a rule may skip the steps of some leaves alone. A transformation with
    `watch` has the last step's `statistics` as one more field.

    A step may hold states packed behind such trees; a tree is then copied out when it is first read.
    """

    #: The trees that were read, by the places of their fields, where states are held packed; None elsewhere.
    _trees: dict[int, Any] | None = None

    def _field(self, place: int) -> Any:
        """The value of a field as users see it."""
        values: Any = self
        held = tuple.__getitem__(values, place)
        if self._trees is None or not isinstance(held, Packed):
            return held
        if place not in self._trees:
            self._trees[place] = held.tree
        return self._trees[place]

    def _values(self) -> tuple[Any, ...]:
        """The values of all fields as users see them."""
        return tuple(map(self._field, range(len(self))))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values())

    def __getitem__(self, place: Any) -> Any:
        return self._values()[place]

    def __reduce__(self) -> Any:
        return _rebuilt, (self._fields, self._values())  # type: ignore[attr-defined]


def _of_values(name: str) -> Callable[..., Any]:
    """The method of tuples of this name, of what users see: tuple's own methods read what is held."""

    def method(self: State, *operands: Any) -> Any:
        return getattr(self._values(), name)(*(x._values() if isinstance(x, State) else x for x in operands))

    return method


for _name in ("eq", "ne", "lt", "le", "gt", "ge", "hash", "contains", "add", "mul", "rmul"):
    setattr(State, f"__{_name}__", _of_values(f"__{_name}__"))


@functools.cache
def state_class(fields: tuple[str, ...]) -> Any:
    """The class of states with these fields. Equal fields give the same class, so tree structures are equal."""
    base: Any = namedtuple("State", [*fields])  # type: ignore[misc]
    shown = {field: property(functools.partial(State._field, place=i)) for i, field in enumerate(fields)}
    text = {"__repr__": lambda self: base.__repr__(base(*self))}
    kind: Any = type("State", (State, base), {**shown, **text, "__module__": __name__, "__doc__": State.__doc__})
    keys = [*map(jax.tree_util.GetAttrKey, fields)]
    jax.tree_util.register_pytree_with_keys(
        kind, lambda state: ([*zip(keys, state, strict=True)], None), lambda _, values: kind._make(values),
        lambda state: (state._values(), None),
    )  # fmt: skip
    return kind


def held(state: Any) -> Any:
    """A state as it is held: packed where its trees are made when they are read."""
    return type(state)._make(tuple.__iter__(state)) if is_held_packed(state) else state


def is_held_packed(state: Any) -> bool:
    """Whether a state is held packed behind its trees."""
    return isinstance(state, State) and state._trees is not None


def behind_trees(state: Any) -> Any:
    """A packed state behind trees like the parameters, which are copied out when they are first read."""
    shown = type(state)._make(tuple.__iter__(state))
    shown._trees = {}
    return shown


def _rebuilt(fields: tuple[str, ...], values: Sequence[Any]) -> Any:
    return state_class(fields)(*values)


def delete_trees(state: Any) -> None:
    """Frees the trees of a state that was donated in another form, as donation does."""
    trees = list(tuple.__iter__(state)) if state._trees is None else [*state._trees.values()]
    for leaf in jax.tree.leaves(trees):
        leaf.delete()


@dataclass(frozen=True)
class Shown:
    """A state as users see it: the name of its field, and whether it is complex for real leaves too."""

    field: str
    as_complex: bool = False


@dataclass(frozen=True)
class Fields:
    """The fields of a state: `arrays` and `numbers` are state of the recipe's rules -> field.

    The states `complexes` are complex for real leaves too, where their imaginary parts are zero.
    """

    arrays: Mapping[str, str]
    numbers: Mapping[str, str]
    complexes: frozenset[str] = frozenset()

    @property
    def every(self) -> dict[str, str]:
        """State -> field, for arrays and numbers."""
        return {**self.arrays, **self.numbers}

    def packed(self, values: Values, tree: Tree, statistics: Any = None) -> Any:
        """Values as users see them, with the statistics of the last step where there are any."""
        places = range(len(tree.arrays))
        fields: dict[str, Any] = {}
        for name, field in self.arrays.items():
            arrays = values.arrays.get(name, {})
            if isinstance(arrays, Pieces):
                fields[field] = arrays.packed()
            else:
                real = {*places} - tree.paired if name in self.complexes else ()
                shown = [arrays.get(place) for place in places]
                fields[field] = tree.of([_as_complex(x) if place in real else x for place, x in enumerate(shown)])
        # Of no leaves, as optax asks where parameters stand in a state, numbers still stand where they do.
        none = None if tree.arrays else jnp.zeros(())
        fields |= {field: values.numbers.get(name, none) for name, field in self.numbers.items()}
        fields |= {} if statistics is None else {STATISTICS: statistics}
        return state_class(("count", *fields))(count=values.count, **fields)

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
            values.arrays[name] = _by_place(getattr(state, field), field, tree, title, name in self.complexes)
        for name, field in self.numbers.items():
            if getattr(state, field) is not None:
                values.numbers[name] = getattr(state, field)
        return values


def _field_of(part: str) -> str:
    """The field of a part of a weight."""
    return part.replace("::", "_")


#: Field of a part of a weight -> its dtype.
_PARTS = {_field_of(part.name): (part.dtype,) for part in PARTS.values()}


def _as_complex(array: Any) -> Any:
    """A real array with imaginary parts of zero."""
    return None if array is None else jax.lax.complex(array, jnp.zeros_like(array))


def _by_place(value: Any, field: str, tree: Tree, title: str, as_complex: bool = False) -> dict[int, Any]:
    if isinstance(value, Packed):
        return Pieces(_by_place(value.pieces(), field, tree, title), value)
    try:
        leaves = tree.structure.flatten_up_to(value)
    except (ValueError, TypeError) as error:
        raise StateMismatch(
            f"{field} of the state of {title} does not have the structure of the parameters, which may have changed "
            f"since init: {error}"
        ) from error
    plain = jnp.real if as_complex else lambda array: array
    by_place = {
        place: paired(array) if place in tree.paired else plain(array)
        for place, array in enumerate(tree.apart(leaves))
        if array is not None
    }
    known = _PARTS.get(field, FLOATS)
    for place, array in by_place.items():
        if not isinstance(array, Coded | Unbiased) and str(getattr(array, "dtype", None)) not in known:
            kind = array.dtype if hasattr(array, "dtype") else type(array).__name__
            raise StateMismatch(
                f"{field} of {tree.names[place]} in the state of {title} is of {kind}, and states are of "
                f"{', '.join(known)}: give what init returned"
            )
    return by_place


def check_state(plan: StepPlan, values: Values, fields: Fields, title: str) -> None:
    """StateMismatch where a state lacks an array or a number of the plan, or has it in another shape."""
    check_values(plan, values, fields.every, title)
    shape = (len(plan.leaves),) if plan.own_counts else ()
    if tuple(getattr(values.count, "shape", (-1,))) != shape or values.count.dtype.kind not in "iu":
        raise StateMismatch(
            f"the count of the state of {title} is not an array of whole numbers of shape {shape}: {CHANGED}"
        )


def fields_of(rules: Sequence[Rule], shown: Mapping[str, Shown], parts: Sequence[str] = ()) -> Fields:
    """The fields for the states of rules: `shown` has some by the state's name, and others have it as an identifier.

    `parts` are the names of what lies beside parameters.
    """
    taken = {"count", "index", STATISTICS}
    numbers = number_states(rules)
    renamed = {name: each.field for name, each in shown.items()} | {part: _field_of(part) for part in parts}
    names = dict.fromkeys([*(name for rule in rules for name in rule.state), *parts])
    fields = {name: unique_name(renamed.get(name, name), taken) for name in names}
    return Fields(
        {name: field for name, field in fields.items() if name not in numbers},
        {name: field for name, field in fields.items() if name in numbers},
        frozenset(name for name, each in shown.items() if each.as_complex),
    )
