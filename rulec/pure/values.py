"""The values of a state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

#: Hyper-parameters of each group: numbers, or 0-d arrays.
Hypers = Sequence[Mapping[str, Any]]


@dataclass
class Values:
    """A state's arrays, without the containers that users see.

    `count` is how often the leaves were updated: one number, or one for each leaf. `arrays` is state -> place of a leaf
    -> array, for the leaves with this state. `numbers` is state -> a vector over the leaves with it or over the groups,
    or one number.
    """

    count: Any
    arrays: dict[str, dict[int, Any]] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.count, self.arrays, self.numbers))

    def copied(self) -> Values:
        """The same arrays in containers of their own."""
        return Values(self.count, {k: copy(v) for k, v in self.arrays.items()}, dict(self.numbers))
