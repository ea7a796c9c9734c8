"""The matrix functions of the language: the axes of their results, and their meaning on NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.arrays.numpy import NUMPY_MATRIX
from rulec.compiler.ir import AXES, Axes
from rulec.errors import RuleError
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


def _square_axes(value: Node, operands: Sequence[Axes]) -> Axes:
    first = operands[0]
    if first.rows is not first.cols:
        sides = " by ".join("1" if x is None else short_text(x) for x in (first.rows, first.cols))
        raise RuleError(f"{value.op.symbol} needs a square matrix, and {short_text(value.args[0])!r} is {sides}")
    return Axes(AXES, first.rows, first.rows)


#: Every matrix function. A backend's own table has the same keys.
MATRIX: Mapping[Op, MatrixFunction] = {
    Op.MATMUL: MatrixFunction(_product_axes, NUMPY_MATRIX[Op.MATMUL], matrices=2, exact=True),
    Op.TRANSPOSE: MatrixFunction(
        lambda _, operands: Axes(AXES, operands[0].cols, operands[0].rows), NUMPY_MATRIX[Op.TRANSPOSE], exact=True
    ),
    Op.NEWTON_SCHULZ: MatrixFunction(_same_axes, NUMPY_MATRIX[Op.NEWTON_SCHULZ], exact=True),
    Op.QR: MatrixFunction(_same_axes, NUMPY_MATRIX[Op.QR]),
    Op.EIGH: MatrixFunction(_square_axes, NUMPY_MATRIX[Op.EIGH]),
    Op.SINGULAR_VECTORS: MatrixFunction(
        lambda value, operands: Axes(AXES, operands[0].rows, value.args[1]), NUMPY_MATRIX[Op.SINGULAR_VECTORS]
    ),
    Op.INVERSE_ROOT: MatrixFunction(_square_axes, NUMPY_MATRIX[Op.INVERSE_ROOT]),
}
