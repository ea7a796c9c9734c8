"""Parameters as a plan knows them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Leaf:
    """A parameter as a plan knows it: its path, its shape, and its dtype and its gradient's by our names.

    `states` are the dtypes of the states that it has already, by name; `paired` says that it is complex, and its shape
    that of the pairs.
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
    """The leaves of these arrays; `states` are those that some have already, by name and place."""
    return tuple(
        Leaf(
            name, tuple(params[i].shape), dtype_name(params[i]), dtype_name(grads[i]),
            tuple((state, dtype_name(arrays[i])) for state, arrays in states.items() if i in arrays), i in paired,
        )
        for i, name in enumerate(names)
    )  # fmt: skip
