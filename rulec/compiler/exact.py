"""NumPy's arrays of mpmath numbers of 50 digits: the matrix functions of the oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rulec.array_api.matrix import matrix_functions
from rulec.array_api.numpy import NumpyFunctions
from rulec.language.expr.arithmetic import mpmath_context, mpmath_table
from rulec.language.expr.node import Op


class ExactFunctions(NumpyFunctions):
    """NumPy's functions, with mpmath's decompositions of one matrix after the other."""

    def is_finite(self, x: Any) -> Any:
        """mpmath's."""
        return mpmath_table()[Op.ISFINITE](x).astype(bool)

    def beside(self, number: Any, x: Any) -> Any:
        """As it is."""
        return number

    def solve_upper(self, a: Any, b: Any) -> Any:
        """Row by row, the last one first."""
        rows: list[Any] = []
        for i in reversed(range(a.shape[-1])):
            known = sum((a[:, i, j, None] * row for j, row in enumerate(reversed(rows), i + 1)), 0 * b[:, i])
            rows.append((b[:, i] - known) / a[:, i, i, None])
        return np.stack(rows[::-1], axis=1) if rows else b

    def qr(self, x: Any) -> Any:
        """By mpmath, which takes no matrix without elements."""
        if not x.shape[-1]:
            return x, np.zeros((len(x), 0, 0), dtype=object)
        pairs = [mpmath_context().qr(_matrix(each), mode="skinny") for each in x]
        return tuple(_stacked([pair[k] for pair in pairs], x) for k in (0, 1))

    def eigh(self, x: Any) -> Any:
        """By mpmath; its eigenvalues ascend."""
        pairs = [mpmath_context().eigsy(_matrix(each)) for each in x]
        values = _stacked([lambdas for lambdas, _ in pairs], x)
        return values.reshape(len(x), -1), _stacked([vectors for _, vectors in pairs], x)


def _matrix(x: Any) -> Any:
    return mpmath_context().matrix(x.tolist())


def _stacked(matrices: Any, like: Any) -> Any:
    return np.array([each.tolist() for each in matrices], dtype=object).reshape(len(like), matrices[0].rows, -1)


#: The matrix functions on arrays of 50-digit numbers.
EXACT_MATRIX: Mapping[Op, Callable[..., Any]] = matrix_functions(ExactFunctions(np))
