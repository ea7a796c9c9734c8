"""A Keras variable as its rule sees it, and the keys of states, which are the same on every backend.

A file of Keras that was saved on one backend is loaded on another: states have one order and one set of shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keras import ops

from rulec.functional.axes import Orientation

#: The name of a state, and the place of its tensor; None for a state of a group or the model.
Key = tuple[str, int | None]

#: The number of updates of a tensor, and those of groups and of the model where these have states.
COUNT = "step"
COUNTS = {"group": "group_updates", "model": "model_updates"}


@dataclass(frozen=True, eq=False)
class Trained:
    """A variable, its orientation where the rule asks for that, its tags, and its group of hyper-parameters."""

    variable: Any
    orientation: Orientation | None
    tags: frozenset[str]
    group: int

    @property
    def names(self) -> list[str]:
        """The names of its tensors: its path, with an index where the variable is a batch of them."""
        path, orientation = self.variable.path, self.orientation
        if orientation is None or not orientation.batch:
            return [path]
        return [f"{path}/{orientation.index(i)}" for i in range(orientation.count)]

    def seen(self, array: Any) -> list[Any]:
        """An array of the variable's shape as the tensors that the rule sees."""
        if self.orientation is None:
            return [array]
        return self.orientation.of_each(self.orientation.stacked(array, ops), ops)

    def back(self, tensors: Sequence[Any]) -> Any:
        """The inverse of `seen`."""
        if self.orientation is None:
            return tensors[0]
        return self.orientation.unstacked(self.orientation.of_all(tensors, ops), ops)


def ordered(tensors: Sequence[Iterable[str]], shared: Mapping[str, str]) -> list[Key]:
    """The keys of all states in order: `tensors` has the names of the states of each tensor, `shared` name -> level."""
    keys: list[Key] = []
    for place, names in enumerate(tensors):
        keys += [(COUNT, place), *((name, place) for name in sorted(names))]
    levels = sorted({*shared.values()})
    return [*keys, *((name, None) for name in sorted(shared)), *((COUNTS[level], None) for level in levels)]
