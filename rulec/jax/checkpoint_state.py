"""A state of JAX with the values of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rulec.checkpoint import Loaded, Parameter, Stored
from rulec.errors import StateMismatch
from rulec.jax.checkpoint_run import JaxRun, states_of
from rulec.jax.machine import call
from rulec.pure.values import Values


@dataclass(frozen=True)
class Filling:
    """A file's content on its way into a state; `fresh` has the first values of leaves that were never updated."""

    run: JaxRun
    file: str
    loaded: Loaded
    fresh: Values

    def values(self, like: Values) -> Values:
        """The content in the structure, dtypes and shardings of a state."""
        values = Values(self._count(like.count))
        for state, arrays in like.arrays.items():
            values.arrays[state] = {place: self._array(place, state, array) for place, array in arrays.items()}
        for state, numbers in like.numbers.items():
            values.numbers[state] = call(jnp.asarray, self._numbers(state, numbers).astype(numbers.dtype))
        return values

    @cached_property
    def _saved(self) -> dict[int, Parameter]:
        """The saved parameters by their places in the tree."""
        return dict(zip(self.run.places, self.loaded.parameters, strict=True))

    def _count(self, first: Any) -> Any:
        steps = [*(p.steps for p in self.loaded.parameters), *self.loaded.group_steps, *self.loaded.model_steps]
        if jnp.ndim(first):
            counts = np.zeros(first.shape, first.dtype)
            counts[self.run.places] = steps[: len(self.run.places)]
            return jnp.asarray(counts)
        if len({*steps}) > 1:
            raise StateMismatch(self._other_counts(steps))
        return jnp.asarray(steps[0] if steps else 0, first.dtype)

    def _other_counts(self, steps: Sequence[int]) -> str:
        other = next(i for i, count in enumerate(steps) if count != steps[0])
        names = [p.name for p in self.loaded.parameters]
        title = names[other] if other < len(names) else "their group or the model"
        return (
            f"in {self.file} {names[0]} was updated {steps[0]} times and {title} {steps[other]} times, and a state "
            f"here has one count for all: save when all were updated equally often, and none but those that are trained"
        )

    def _array(self, place: int, state: str, like: Any) -> Any:
        saved, param = self._state(place, state), self.run.tree.arrays[place]
        if saved.shape != tuple(like.shape):
            raise StateMismatch(
                f"{state} of {self._saved[place].name} was saved with shape {saved.shape}, where it has "
                f"{tuple(like.shape)}: give the hyper-parameters that decide it as they were"
            )
        return array_of(saved, like, param if saved.shape == tuple(param.shape) else like)

    def _state(self, place: int, state: str) -> Stored:
        """A state of a leaf, or its first value where the leaf was never updated."""
        saved = self._saved[place].states
        return saved[state] if state in saved else states_of(self.run.plan, self.fresh, place)[state]

    def _numbers(self, state: str, like: Any) -> np.ndarray[Any, Any]:
        """A state of numbers: for each of its leaves, for each group or for the model."""
        plan, loaded = self.run.plan, self.loaded
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


def array_of(stored: Stored, like: Any, placed_as: Any) -> Any:
    """A saved array in the dtype of `like`, on the devices of `placed_as`."""
    values = np.array(stored.values.astype(like.dtype))
    with jax.enable_x64(True):
        sharding = getattr(placed_as, "sharding", None)
        committed = getattr(placed_as, "committed", False)
        return jax.device_put(values, sharding) if committed else jnp.array(values)
