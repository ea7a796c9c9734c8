"""The reductions of programs: each has an identity, and an operation that combines two partial results.

Reductions of segments are here too: values of one axis of a tensor whose batch of matrices has several axes, and values
of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.language.expr.node import Op


@dataclass(frozen=True)
class Reduction:
    """One reduction.

    `nothing` is its identity: the result over no numbers. `join` joins two partial results; `ufunc` is NumPy's `join`.
    `code` is its number in the tables that kernels read.
    """

    nothing: float
    join: Op
    ufunc: np.ufunc
    code: int


#: All reductions of programs: means, norms and counts are built on them.
REDUCTIONS: Mapping[Op, Reduction] = {
    Op.SUM: Reduction(0.0, Op.ADD, np.add, 0),
    Op.MIN: Reduction(np.inf, Op.MINIMUM, np.minimum, 1),
    Op.MAX: Reduction(-np.inf, Op.MAXIMUM, np.maximum, 2),
}


def segments_of(facts: Mapping[str, float]) -> tuple[int, ...]:
    """The extents of the axes of a tensor's batch, from its facts."""
    extents: list[int] = []
    while (name := f"part{len(extents)}") in facts:
        extents.append(int(facts[name]))
    return tuple(extents)


def shape_of_letters(letters: str, extents: Mapping[str, int]) -> tuple[int, int, int]:
    """The shape of a value with these axes, `b` or a digit for a part of the batch, with 1 for the other axes."""
    batch = next((letter for letter in letters if letter == "b" or letter.isdigit()), "")
    return tuple(extents[c] if c and c in letters else 1 for c in (batch, "i", "j"))  # type: ignore[return-value]


def reduced_to(
    part: int, x: Any, extents: Sequence[int], axes: Sequence[int], reduce: Callable[[Any, tuple[int, ...]], Any]
) -> Any:  # fmt: skip
    """`x`, `(batch, rows, cols)`, reduced over the other axes of the batch and over `axes` of its own.

    `reduce` takes an array and the axes to keep with an extent of 1.
    """
    whole = x.reshape(*extents, *x.shape[1:])
    others = [k for k in range(len(extents)) if k != part]
    result = reduce(whole, (*others, *(len(extents) - 1 + axis for axis in axes if axis)))
    return result.reshape(extents[part], *result.shape[-2:])


def spread_from(
    part: int, x: Any, extents: Sequence[int], broadcast: Callable[[Any, tuple[int, ...]], Any]
) -> Any:  # fmt: skip
    """`x`, `(extent of the part, rows, cols)`, for each matrix of the batch."""
    sides = tuple(x.shape[1:])
    apart = x.reshape(*(n if k == part else 1 for k, n in enumerate(extents)), *sides)
    return broadcast(apart, (*extents, *sides)).reshape(math.prod(extents), *sides)
