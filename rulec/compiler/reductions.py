"""The reductions of programs: what reducing nothing gives, and what makes one of two parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rulec.language.node import Op


@dataclass(frozen=True)
class Reduction:
    """`nothing` is what no number reduces to, `join` makes one of two parts (NumPy's is `ufunc`).

    `code` stands for it in tables of numbers that kernels read.
    """

    nothing: float
    join: Op
    ufunc: np.ufunc
    code: int


#: Programs have no others: means, norms and counts are made of these.
REDUCTIONS: Mapping[Op, Reduction] = {
    Op.SUM: Reduction(0.0, Op.ADD, np.add, 0),
    Op.MIN: Reduction(np.inf, Op.MINIMUM, np.minimum, 1),
    Op.MAX: Reduction(-np.inf, Op.MAXIMUM, np.maximum, 2),
}
