"""The state before the first step, and checks of a state against a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rulec.compiler.view import MatrixView
from rulec.errors import StateMismatch
from rulec.functional.plan import Bucket, StepPlan
from rulec.functional.quantized import Coded, Unbiased, encode
from rulec.functional.values import Hypers, PureLibrary, Values
from rulec.language.expr.node import Node, Op
from rulec.language.rule import Rule
from rulec.runtime.storage.allocator import StateSpec

#: Makes a state in its shape from a first value: a number, or an array of its parameter's shape.
Stored = Callable[[StateSpec, Any, tuple[int, ...], Any, MatrixView], Any]

_Numbers = Mapping[str, dict[int, Any]]


def first_values(
    plan: StepPlan, params: Sequence[Any], hyper: Hypers, number_dtype: str, values: Values, library: PureLibrary,
    stored: Stored | None = None,
) -> Values:  # fmt: skip
    """The state before the first step, written to `values`, which has only a count before.

    Numbers are of `number_dtype`; `stored` makes the arrays, by default by a broadcast.
    """
    values.arrays |= {name: {} for name in plan.arrays}
    numbers: _Numbers = {name: {} for name in plan.numbers}
    for bucket in plan.buckets:
        for i, place in enumerate(bucket.places):
            first = _First(bucket, i, params[place], hyper[bucket.groups[i]], library)
            for spec in bucket.specs:
                values.arrays[spec.name][place] = first.array(spec, stored)
            for level in ("tensor", "group", "model"):
                for name in plan.states_of(bucket, level):
                    numbers[name][place] = first.number(name)
    for name, level in plan.numbers.items():
        of_leaves = numbers[name]
        if level == "tensor":
            whole = [of_leaves[place] for place in plan.having[name]]
        else:
            by_group = {group: of_leaves[place] for place, group in _groups(plan, name)}
            any_group = next(iter(by_group.values()))
            whole = [by_group.get(group, any_group) for group in range(plan.groups if level == "group" else 1)]
        vector = library.cast(library.of.xp.stack(whole), number_dtype)
        values.numbers[name] = vector[0] if level == "model" else vector
    return values


def _groups(plan: StepPlan, name: str) -> list[tuple[int, int]]:
    """The leaves with a state, each with its group; of a state of the model one leaf, with group 0."""
    pairs = [(p, g) for b in plan.buckets for p, g in zip(b.places, b.groups, strict=True) if p in plan.having[name]]
    return pairs if plan.numbers[name] == "group" else [(min(pairs)[0], 0)]


class _First:
    """The first states of one leaf."""

    def __init__(self, bucket: Bucket, i: int, param: Any, hyper: Mapping[str, Any], library: PureLibrary) -> None:
        self.bucket, self.param, self.library = bucket, param, library
        self.view, self.facts, self.known = bucket.views[i], bucket.facts[i], {**hyper, **bucket.facts[i]}

    def array(self, spec: StateSpec, stored: Stored | None) -> Any:
        """A state that is an array."""
        value = self.param if spec.copies_parameter else self._value(spec.init)
        shape = tuple(spec.shape(self.view, self.bucket.static, self.facts))
        if stored is None:
            array = self.library.spread(self.library.cast(value, spec.dtype), shape)
        else:
            array = stored(spec, value, shape, self.param, self.view)
        form = self.bucket.formats.get(spec.name)
        if spec.name in self.bucket.program.memory.unbiased:
            return Unbiased(array)
        return array if form is None else encode(form, array, self.library.of)

    def number(self, name: str) -> Any:
        """A state that is a number, in float64."""
        init = self.bucket.program.buffer(name).init
        assert init is not None
        return self.library.constant(self._value(init)).reshape(())

    def _value(self, expression: Node) -> Any:
        return self.library.evaluated([expression], self._leaf)[expression]

    def _leaf(self, value: Node) -> Any:
        if value.op is Op.LOAD:
            return self.library.cast(self.param, self.bucket.layout.compute)
        return self.library.constant(value.arg if value.op is Op.CONST else self.known[str(value.arg)])


#: Why a state may not be of its parameters and its rule.
CHANGED = "the parameters or the rule may have changed since init"


#: The levels of states that are numbers.
_NUMBERS = ("tensor", "group", "model")


def number_states(rules: Iterable[Rule]) -> set[str]:
    """The names of the states with one number for a tensor, a group or the model."""
    states = [item for rule in rules for item in rule.state.items()]
    return {name for name, state in states if state.shape is None and state.per in _NUMBERS}


def check_values(plan: StepPlan, values: Values, fields: Mapping[str, str], title: str) -> None:
    """StateMismatch where a state lacks an array or a number of the plan, or has it in another shape.

    `fields` is state -> the name of its field for users.
    """
    for bucket in plan.buckets:
        for spec, place, _, shape in bucket.state_shapes():
            array = values.arrays.get(spec.name, {}).get(place)
            what = f"{fields[spec.name]} of {plan.leaves[place].name}"
            if array is None:
                raise StateMismatch(f"there is no {what} in the state of {title}: {CHANGED}")
            if isinstance(array, Coded):
                if not array.fits(shape):
                    raise StateMismatch(
                        f"{what} in the state of {title} has codes and scales that are not of shape {shape}: {CHANGED}"
                    )
            elif tuple(array.shape) != shape:
                raise StateMismatch(
                    f"{what} in the state of {title} has shape {array.shape} and not {shape}: {CHANGED}"
                )
    for name, level in plan.numbers.items():
        shape = {"tensor": (len(plan.having[name]),), "group": (plan.groups,), "model": ()}[level]
        if tuple(getattr(values.numbers.get(name), "shape", (-1,))) != shape:
            raise StateMismatch(f"{fields[name]} of the state of {title} is not an array of shape {shape}: {CHANGED}")
