"""The values of a plan as states by key, for frameworks that keep each array of a state by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rulec.functional.plan import StepPlan
from rulec.functional.values import PureLibrary, Values
from rulec.runtime.keyed import Key


def by_key(plan: StepPlan, values: Values) -> dict[Key, Any]:
    """Every state by its name and the place of its leaf; states of groups and the model are vectors without a place."""
    states: dict[Key, Any] = {(name, i): x for name, arrays in values.arrays.items() for i, x in arrays.items()}
    for name, level in plan.numbers.items():
        numbers = values.numbers[name]
        if level == "tensor":
            states |= {(name, place): numbers[i] for i, place in enumerate(plan.having[name])}
        else:
            states[name, None] = numbers.reshape(-1)
    return states


def of_keys(plan: StepPlan, count: Any, states: Mapping[Key, Any], library: PureLibrary) -> Values:
    """The inverse of `by_key`, with `count` as the step count of the values; `states` may lack some."""
    values = Values(count, by_name(states, plan.arrays))
    for name, level in plan.numbers.items():
        if level == "tensor":
            numbers = [states[name, place] for place in plan.having[name] if (name, place) in states]
            if len(numbers) == len(plan.having[name]):
                values.numbers[name] = library.of.xp.stack(numbers)
        elif (name, None) in states:
            values.numbers[name] = states[name, None].reshape(() if level == "model" else (-1,))
    return values


def by_name(states: Mapping[Key, Any], names: Iterable[str]) -> dict[str, dict[int, Any]]:
    """State -> place of a leaf -> array, for the states of these names in this order."""
    arrays: dict[str, dict[int, Any]] = {name: {} for name in names}
    for (name, place), array in states.items():
        if name in arrays and place is not None:
            arrays[name][place] = array
    return arrays
