"""The facts of a parameter for a plan, and the values of a state."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Leaf:
    """The facts of a parameter for a plan: its path, its shape, and its dtype and its gradient's by our names.

    `states` are the names and dtypes of the states that it has already, or the keys of their formats. A `paired` leaf
    is complex, and its shape is of the pairs of reals.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    grad_dtype: str
    states: tuple[tuple[str, str], ...] = ()
    paired: bool = False


def dtype_name(array: Any) -> str:
    """The dtype of an array by our names."""
    return str(array.dtype).rpartition(".")[2]


def leaves_of(
    names: Sequence[str], params: Sequence[Any], grads: Sequence[Any], states: Mapping[str, Mapping[int, Any]],
    paired: Collection[int] = (),
) -> tuple[Leaf, ...]:  # fmt: skip
    """The leaves of these arrays; existing `states` are name -> place of a leaf -> array."""
    return tuple(
        Leaf(
            name, tuple(params[i].shape), dtype_name(params[i]), dtype_name(grads[i]),
            tuple((state, dtype_name(arrays[i])) for state, arrays in states.items() if i in arrays), i in paired,
        )
        for i, name in enumerate(names)
    )  # fmt: skip


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
