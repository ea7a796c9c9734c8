"""The matrix functions on NumPy arrays of 50-digit numbers: the oracle's.

Decompositions are mpmath's, of one matrix after the other. Every function is as determined as it is on other arrays: a
root is a function of its matrix, and has digits for every matrix. Eigenvectors and singular vectors have the sign that
makes their largest component positive; where two values are equal, any basis of their space is right, and none has
digits to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from rulec.array_api.matrix import MatrixFunctions, matrix_functions
from rulec.array_api.numpy import NumpyFunctions
from rulec.errors import RuleError
from rulec.language.expr.arithmetic import mpmath_context, mpmath_table
from rulec.language.expr.node import Op

#: Two numbers whose difference is below this part of the larger count as equal. Vectors in float64 have an error of
#: about 2**-53 divided by it, so rounding may exchange them where more is equal.
EQUAL = 2.0**-32


class ExactFunctions(NumpyFunctions):
    """NumPy's functions, with mpmath's decompositions of one matrix after the other."""

    def is_finite(self, x: Any) -> Any:
        """mpmath's."""
        return mpmath_table()[Op.ISFINITE](x).astype(bool)

    def beside(self, number: Any, x: Any) -> Any:
        """As it is."""
        return number

    def power(self, x: Any, exponent: Any) -> Any:
        """By the meaning of the operation: a root of zero is infinite where mpmath raises an error."""
        return mpmath_table()[Op.POW](x, exponent)

    def solve_upper(self, a: Any, b: Any) -> Any:
        """Row by row, the last one first."""
        rows: list[Any] = []
        for i in reversed(range(a.shape[-1])):
            known = sum((a[:, i, j, None] * row for j, row in enumerate(reversed(rows), i + 1)), 0 * b[:, i])
            rows.append((b[:, i] - known) / a[:, i, i, None])
        return np.stack(rows[::-1], axis=1) if rows else b

    def qr(self, x: Any) -> Any:
        """Decomposes by mpmath."""
        orthogonal, triangular = np.zeros_like(x), np.zeros_like(x, shape=(len(x), x.shape[2], x.shape[2]))
        for place, each in _matrices(x):
            pair = mpmath_context().qr(each, mode="skinny")
            orthogonal[place], triangular[place] = map(_array, pair)
        return orthogonal, triangular

    def eigh(self, x: Any) -> Any:
        """Decomposes by mpmath; eigenvalues ascend."""
        values, vectors = np.zeros_like(x, shape=x.shape[:2]), np.zeros_like(x)
        for place, each in _matrices(x):
            lambdas, columns = mpmath_context().eigsy(each)
            values[place], vectors[place] = _array(lambdas).reshape(-1), _array(columns)
        return values, vectors

    def svd(self, x: Any) -> Any:
        """The left singular vectors and the singular values, which descend."""
        count = min(x.shape[1:])
        vectors, values = np.zeros_like(x, shape=(*x.shape[:2], count)), np.zeros_like(x, shape=(len(x), count))
        for place, each in _matrices(x):
            left, sizes, _ = mpmath_context().svd_r(each)
            vectors[place], values[place] = _array(left), _array(sizes).reshape(-1)
        return vectors, values


def _matrices(x: Any) -> Any:
    """The matrices of a stack with elements as mpmath's, with their places."""
    return [(place, mpmath_context().matrix(each.tolist())) for place, each in enumerate(x) if each.size]


def _array(matrix: Any) -> Any:
    return np.array(matrix.tolist(), dtype=object)


class _ExactMatrixFunctions(MatrixFunctions):
    """The matrix functions, with an error for vectors that rounding would choose."""

    of: ExactFunctions

    def eigh(self, x: Any) -> Any:
        """The eigenvectors; RuleError where they are not determined."""
        values, vectors = self.of.eigh(x)
        for lambdas, columns in zip(values, vectors, strict=True):
            _check_determined("eigh", "eigenvalues", lambdas, columns)
        return self.signed(vectors)

    def left_vectors(self, x: Any, count: int) -> Any:
        """The first singular vectors; RuleError where they are not determined."""
        vectors, values = self.of.svd(x)
        for sizes, columns in zip(values, vectors, strict=True):
            # A vector of the value zero is one of the space of all that are orthogonal to the others.
            free = [0] if x.shape[1] > x.shape[2] else []
            known = [*sizes, *free][: count + 1]
            _check_determined("singular_vectors", "singular values", np.array(known, object), columns[:, :count])
        return vectors[..., :count]


def _check_determined(function: str, what: str, values: Any, columns: Any) -> None:
    """RuleError where two values are equal, or a column has components of the largest size with both signs.

    A matrix of zeros has the unit vectors, as in every library.
    """
    size = max(np.abs(values), default=0)
    if size and any(abs(a - b) <= EQUAL * size for a, b in pairwise(values)):
        why = f"two of its {what} are equal, so any basis of their space is right"
    elif any(_is_torn(column) for column in columns.T):
        why = "a vector has several largest components, of both signs, so either sign is right"
    else:
        return
    raise RuleError(f"{function} of a matrix of {len(columns)} rows has no 50-digit form here: {why}")


def _is_torn(column: Any) -> bool:
    """Whether the largest components of a vector have both signs, so that rounding chooses the vector's."""
    most = max(np.abs(column), default=0)
    largest = [x > 0 for x in column if abs(x) >= (1 - EQUAL) * most]
    return len({*largest}) > 1


_OF = ExactFunctions(np)

#: The matrix functions on arrays of 50-digit numbers.
EXACT_MATRIX: Mapping[Op, Callable[..., Any]] = matrix_functions(_OF, _ExactMatrixFunctions(_OF))
