"""The reductions of programs: each has an identity, and an operation that joins two partial results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
