"""The matrix functions of the language: what axes each gives, and what it means on NumPy arrays.

Matrices are stacks `(batch, rows, cols)` of one dtype, and results keep that dtype. The numbers beside them are of one
element, but for those that a stack `(batch, 1, 1)` may differ in. NaN or infinity in a matrix makes the result for that
matrix NaN; its neighbours in the stack are untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.compiler.ir import AXES, Axes
from rulec.errors import RuleError, TensorError
from rulec.language.counts import MAX_STEPS, count_problem, is_count
from rulec.language.node import Node, Op
from rulec.language.text import short_text

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class MatrixFunction:
    """One row of the table.

    The first `matrices` operands are matrices, the others numbers. `axes` gives the result's axes from the node and
    its operands' axes, or a RuleError; `compute` takes the operands' values. Where `exact` it also takes arrays of
    50-digit numbers.
    """

    axes: Callable[[Node, Sequence[Axes]], Axes]
    compute: Callable[..., Array]
    matrices: int = 1
    exact: bool = False


def matrix_axes(value: Node, operands: Sequence[Axes]) -> Axes:
    """The axes of a matrix function of operands with these axes; RuleError where they do not fit."""
    function = MATRIX[value.op]
    for operand, axes in zip(value.args[: function.matrices], operands, strict=False):
        if not {"i", "j"} <= set(axes.letters):
            raise RuleError(f"{value.op.symbol} needs a matrix, and {short_text(operand)!r} is none")
    return function.axes(value, operands)


def _product_axes(value: Node, operands: Sequence[Axes]) -> Axes:
    first, second = operands
    if first.cols is not second.rows:
        raise RuleError(f"the inner sides of {short_text(value)!r} differ")
    return Axes(AXES, first.rows, second.cols)


def _same_axes(_: Node, operands: Sequence[Axes]) -> Axes:
    return operands[0]


def _transposed_axes(_: Node, operands: Sequence[Axes]) -> Axes:
    return Axes(AXES, operands[0].cols, operands[0].rows)


def _square_axes(value: Node, operands: Sequence[Axes]) -> Axes:
    first = operands[0]
    if first.rows is not first.cols:
        sides = " by ".join("1" if x is None else short_text(x) for x in (first.rows, first.cols))
        raise RuleError(f"{value.op.symbol} needs a square matrix, and {short_text(value.args[0])!r} is {sides}")
    return Axes(AXES, first.rows, first.rows)


def _leading_axes(value: Node, operands: Sequence[Axes]) -> Axes:
    return Axes(AXES, operands[0].rows, value.args[1])


def _transpose(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


def _where_finite(compute: Callable[..., Array]) -> Callable[..., Array]:
    """LAPACK raises, or gives anything, where a matrix has NaN or infinity: give NaN."""

    def guarded(x: Array, *numbers: Any) -> Array:
        finite = np.isfinite(x).all(axis=(-2, -1), keepdims=True)
        return np.where(finite, compute(np.where(finite, x, 0), *numbers), np.nan).astype(x.dtype, copy=False)

    return guarded


def iterations(steps: Any) -> int:
    """How often newton_schulz iterates; RuleError for what is no such number."""
    if not is_count(steps, 0, MAX_STEPS):
        raise RuleError(count_problem("the number of steps of newton_schulz", f"{float(steps):g}", 0, MAX_STEPS))
    return int(steps)


def leading(rank: Any, x: Any) -> int:
    """How many singular vectors of a stack of matrices are wanted; TensorError where it has not so many."""
    most = min(x.shape[-2:])
    if not is_count(rank, 1, most):
        sides = f"{x.shape[-2]} by {x.shape[-1]}"
        raise TensorError(f"a matrix of {sides} has no {float(rank):g} singular vectors: choose from 1 to {most}")
    return int(rank)


def newton_schulz(x: Array, steps: Any) -> Array:
    """The quintic iteration towards the nearest orthogonal matrix, with Muon's coefficients (Jordan, 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[-2] > x.shape[-1]
    y = _transpose(x) if tall else x
    norm = np.sum(y * y, axis=(-2, -1), keepdims=True) ** 0.5
    y = y / np.maximum(norm, 1e-7)
    for _ in range(iterations(steps)):
        gram = np.matmul(y, _transpose(y))
        y = a * y + np.matmul(b * gram + c * np.matmul(gram, gram), y)
    return _transpose(y) if tall else y


def _signed(vectors: Array) -> Array:
    """The same columns, each with its largest component positive: their signs are the algorithm's whim otherwise."""
    if not vectors.size:
        return vectors
    largest = np.argmax(np.abs(vectors), axis=-2, keepdims=True)
    return np.where(np.take_along_axis(vectors, largest, axis=-2) < 0, -vectors, vectors)


def _qr(x: Array) -> Array:
    """The orthogonal factor that belongs to a triangular one without negative diagonal elements: there is one."""
    if x.shape[-2] < x.shape[-1]:
        raise TensorError(f"qr needs at least as many rows as columns, and was given {_sides(x)}: transpose the matrix")
    orthogonal, triangular = np.linalg.qr(x)
    diagonal = np.diagonal(triangular, axis1=-2, axis2=-1)[..., None, :]
    return np.where(diagonal < 0, -orthogonal, orthogonal)


def _eigh(x: Array) -> Array:
    return _signed(np.linalg.eigh(x)[1])


def _singular_vectors(x: Array, rank: Any) -> Array:
    return _signed(np.linalg.svd(x, full_matrices=False)[0][..., : leading(rank, x)])


def _inverse_root(x: Array, order: Any, eps: Any = 0) -> Array:
    lambdas, vectors = np.linalg.eigh(x)
    raised = np.maximum(lambdas[..., None, :], 0) + np.asarray(eps, x.dtype)
    root: Array = (vectors * raised ** (-1 / np.asarray(order, x.dtype))) @ _transpose(vectors)
    return root


def _sides(x: Array) -> str:
    return f"{x.shape[-2]} by {x.shape[-1]}"


#: Every matrix function. A backend's own table has the same keys.
MATRIX: Mapping[Op, MatrixFunction] = {
    Op.MATMUL: MatrixFunction(_product_axes, np.matmul, matrices=2, exact=True),
    Op.TRANSPOSE: MatrixFunction(_transposed_axes, _transpose, exact=True),
    Op.NEWTON_SCHULZ: MatrixFunction(_same_axes, newton_schulz, exact=True),
    Op.QR: MatrixFunction(_same_axes, _where_finite(_qr)),
    Op.EIGH: MatrixFunction(_square_axes, _where_finite(_eigh)),
    Op.SINGULAR_VECTORS: MatrixFunction(_leading_axes, _where_finite(_singular_vectors)),
    Op.INVERSE_ROOT: MatrixFunction(_square_axes, _where_finite(_inverse_root)),
}
