"""States between a checkpoint and the values of a functional step, for any library of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from rulec.checkpoint import Loaded, Parameter, Stored
from rulec.checkpoint.convert import decoded
from rulec.compiler.layout import scale_name
from rulec.errors import StateMismatch
from rulec.formats import UNBIASED, decode, encode
from rulec.functional.plan import StepPlan
from rulec.functional.quantized import Coded, Unbiased
from rulec.functional.values import Values


class FileArrays(Protocol):
    """The way between a library's arrays and those of a file."""

    def stored(self, array: Any, format: str = "") -> Stored:
        """The bytes of an array; an array of codes has the key of its format."""

    def array(self, stored: Stored, like: Any, placed_as: Any) -> Any:
        """A saved array in the shape and dtype of `like`, on the devices of `placed_as`."""


def states_of(plan: StepPlan, values: Values, place: int, library: FileArrays) -> dict[str, Stored]:
    """The states of the leaf at a place, by the rule's names."""
    states = {name: arrays[place] for name, arrays in values.arrays.items() if place in arrays}
    coded = {name: state for name, state in states.items() if isinstance(state, Coded)}
    unbiased = {name: state for name, state in states.items() if isinstance(state, Unbiased)}
    states |= {name: state.values for name, state in unbiased.items()}
    for name, state in coded.items():
        states[name] = state.codes.reshape(state.format.codes_shape(plan.leaves[place].shape))
        states[scale_name(name)] = state.scales.reshape(-1)
    for name, level in plan.numbers.items():
        if level == "tensor" and place in plan.having[name]:
            states[name] = np.asarray(values.numbers[name])[plan.having[name].index(place)]
    keys = {name: state.format.key for name, state in coded.items()} | dict.fromkeys(unbiased, UNBIASED)
    return {name: library.stored(array, keys.get(name, "")) for name, array in states.items()}


@dataclass(frozen=True)
class Filling:
    """A file's content on its way into the values of a plan.

    `loaded` has the parameters at `places` of the plan, and `params` are all of its leaves. `fresh` has the first
    values of leaves that were never updated.
    """

    file: str
    loaded: Loaded
    plan: StepPlan
    places: Sequence[int]
    params: Sequence[Any]
    fresh: Values
    library: FileArrays

    def values(self, like: Values) -> Values:
        """The content in the structure, dtypes and devices of other values."""
        values = Values(self._count(like.count))
        for state, arrays in like.arrays.items():
            values.arrays[state] = {place: self._filled(place, state, array) for place, array in arrays.items()}
        for state, numbers in like.numbers.items():
            values.numbers[state] = self.library.array(Stored.of(self._numbers(state, numbers)), numbers, None)
        return values

    @cached_property
    def _saved(self) -> dict[int, Parameter]:
        """The saved parameters by their places."""
        return dict(zip(self.places, map(decoded, self.loaded.parameters), strict=True))

    def _count(self, first: Any) -> Any:
        steps = [*(p.steps for p in self.loaded.parameters), *self.loaded.group_steps, *self.loaded.model_steps]
        counts = np.zeros(first.shape, np.int64)
        if first.ndim:
            counts[self.places] = steps[: len(self.places)]
        elif len({*steps}) > 1:
            raise StateMismatch(self._other_counts(steps))
        elif steps:
            counts[()] = steps[0]
        return self.library.array(Stored.of(counts), first, None)

    def _other_counts(self, steps: Sequence[int]) -> str:
        other = next(i for i, count in enumerate(steps) if count != steps[0])
        names = [p.name for p in self.loaded.parameters]
        title = names[other] if other < len(names) else "their group or the model"
        return (
            f"in {self.file} {names[0]} was updated {steps[0]} times and {title} {steps[other]} times, and a state "
            f"here has one count for all: save when all were updated equally often, and none but those that are trained"
        )

    def _filled(self, place: int, state: str, like: Any) -> Any:
        """A state as `like` is stored."""
        if isinstance(like, Coded):
            return self._codes(place, state, like)
        if isinstance(like, Unbiased):
            return Unbiased(self._array(place, state, like.values))
        return self._array(place, state, like)

    def _array(self, place: int, state: str, like: Any) -> Any:
        saved, param = self._state(place, state), self.params[place]
        if saved.shape != tuple(like.shape):
            raise self._other_shape(place, state, saved.shape, tuple(like.shape))
        return self.library.array(saved, like, param if saved.shape == tuple(param.shape) else like)

    def _other_shape(self, place: int, state: str, saved: Sequence[int], here: Sequence[int]) -> StateMismatch:
        return StateMismatch(
            f"{state} of {self._saved[place].name} was saved with shape {saved}, where it has {here}: give the "
            f"hyper-parameters that decide it as they were"
        )

    def _codes(self, place: int, state: str, like: Coded) -> Coded:
        """A state in the format of `like`: the saved codes where they are in it."""
        form, param = like.format, self.params[place]
        saved = self.loaded.parameters[self.places.index(place)].states
        codes, scales = saved.get(state), saved.get(scale_name(state))
        if codes is None or scales is None or codes.format != form.key:
            values = self._state(place, state)
            if values.shape != tuple(param.shape):
                raise self._other_shape(place, state, values.shape, tuple(param.shape))
            codes, scales = map(Stored.of, encode(form, values.values))
        placed_as = param if form.bits == 8 else like.codes
        array = self.library.array
        return Coded(array(codes, like.codes, placed_as), array(scales, like.scales, like.scales), form)

    def _state(self, place: int, state: str) -> Stored:
        """A state of a leaf, decoded, or its first value where the leaf was never updated."""
        saved = self._saved[place].states
        if state in saved:
            return saved[state]
        fresh = self.fresh.arrays.get(state, {}).get(place)
        if isinstance(fresh, Coded):
            form, shape = fresh.format, tuple(self.params[place].shape)
            codes, scales = np.asarray(fresh.codes).reshape(form.codes_shape(shape)), np.asarray(fresh.scales)
            return Stored.of(decode(form, codes, scales.reshape(-1), shape))
        return states_of(self.plan, self.fresh, place, self.library)[state]

    def _numbers(self, state: str, like: Any) -> np.ndarray[Any, Any]:
        """A state of numbers: for each of its leaves, for each group or for the model."""
        plan, loaded = self.plan, self.loaded
        level = plan.numbers[state]
        if level == "tensor":
            return np.array([self._state(place, state).number for place in plan.having[state]])
        if not loaded.begun:
            return np.asarray(self.fresh.numbers[state])
        if level == "group" and np.shape(like) != (plan.groups,):
            raise StateMismatch(
                f"{state} of the state has shape {np.shape(like)}, and the rule has {plan.groups} groups"
            )
        return np.array(loaded.numbers[state]).reshape(np.shape(like))
