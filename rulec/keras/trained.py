"""A Keras variable as its rule sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keras import ops

from rulec.functional.axes import Orientation


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
        return [self.variable.path] if self.orientation is None else self.orientation.names(self.variable.path)

    def seen(self, array: Any) -> list[Any]:
        """An array of the variable's shape as the tensors that the rule sees."""
        return [array] if self.orientation is None else self.orientation.apart(array, ops)

    def back(self, tensors: Sequence[Any]) -> Any:
        """The inverse of `seen`."""
        return tensors[0] if self.orientation is None else self.orientation.joined(tensors, ops)
