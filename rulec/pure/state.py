"""Checks of a state against a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rulec.errors import StateMismatch
from rulec.language.rule import Rule
from rulec.pure.plan import StepPlan
from rulec.pure.values import Values

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
            if tuple(array.shape) != shape:
                raise StateMismatch(
                    f"{what} in the state of {title} has shape {array.shape} and not {shape}: {CHANGED}"
                )
    for name, level in plan.numbers.items():
        shape = {"tensor": (len(plan.having[name]),), "group": (plan.groups,), "model": ()}[level]
        if tuple(getattr(values.numbers.get(name), "shape", (-1,))) != shape:
            raise StateMismatch(f"{fields[name]} of the state of {title} is not an array of shape {shape}: {CHANGED}")
