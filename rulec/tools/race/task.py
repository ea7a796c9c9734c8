"""A task of a race: first parameters, and the losses and gradients of many runs at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]

#: The parameters of all runs, by name: arrays of shape (rates, seeds, *shape).
Stack = dict[str, Array]


class Task(Protocol):
    """Losses of a model. The data of a run follow from its seed and the step alone."""

    @property
    def name(self) -> str:
        """The task's name in tables and pages."""
        ...

    @property
    def steps(self) -> int:
        """The number of steps of a race, where the user names none."""
        ...

    @property
    def tags(self) -> Mapping[str, frozenset[str]]:
        """The words of parameters, by name, for rules with `tagged(...)`."""
        ...

    def initial(self, seed: int) -> dict[str, Array]:
        """The first parameters of a seed, in float32 or float64."""
        ...

    def gradients(self, params: Stack, step: int, seeds: Sequence[int]) -> tuple[Array, Stack]:
        """The losses, float64 of shape (rates, seeds), and the gradients of a step, counted from 0.

        `seeds` are those of the second axis.
        """
        ...

    def measures(self, params: Stack, seeds: Sequence[int]) -> dict[str, Array]:
        """Figures beside the training loss, such as a test loss, by name: arrays of shape (rates, seeds)."""
        ...


def of_run(stack: Stack, run: tuple[int, ...]) -> dict[str, Array]:
    """The arrays of one run, at the places of its rate and its seed: views."""
    place: Any = (*run, ...)
    return {name: array[place] for name, array in stack.items()}


def stacked(task: Task, rates: int, seeds: Sequence[int]) -> Stack:
    """The first parameters of all runs: equal for every rate."""
    first = [task.initial(seed) for seed in seeds]
    return {
        name: np.array(np.broadcast_to(np.stack([p[name] for p in first]), (rates, len(seeds), *a.shape)), order="C")
        for name, a in first[0].items()
    }
