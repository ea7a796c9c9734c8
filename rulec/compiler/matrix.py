"""The matrix functions of the language: the axes of their results, and their meaning on NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.array_api.numpy import NUMPY_MATRIX
from rulec.compiler.digits import EXACT_MATRIX
from rulec.compiler.indices import exact_index, index_axes, numpy_index
from rulec.compiler.ir import AXES, Axes, axes_of_level
from rulec.errors import RuleError
from rulec.language.expr.counts import difference, simplified
from rulec.language.expr.node import Node, Op, const, node, walk
from rulec.language.expr.static import inside, matrix_operands, settings, statics
from rulec.language.expr.text import short_text
from rulec.language.rule_data import RuleData

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class MatrixFunction:
    """One row of the table.

    The first `matrices` operands are matrices, the others numbers. `axes` gives the result's axes from the node and
    its operands' axes, or a RuleError; `compute` takes the operands' values, and `exact` does as arrays of 50-digit
    numbers.
    """

    axes: Callable[[Node, Sequence[Axes]], Axes]
    compute: Callable[..., Array]
    exact: Callable[..., Array]
    matrices: int = 1


def matrix_axes(value: Node, operands: Sequence[Axes], one: Callable[[Node], Node] = simplified) -> Axes:
    """The axes of a matrix function of operands with these axes; RuleError where they do not fit.

    `one` gives the same node for equal extents.
    """
    called = settings(value).get("function", value.op.symbol)
    for operand, axes in zip(value.args[: matrices(value)], operands, strict=False):
        if not {"i", "j"} <= set(axes.letters):
            raise RuleError(f"{called} needs a matrix, and {short_text(operand)!r} is none")
    return _block_axes(value, operands, one) if value.op is Op.IN_BLOCKS else MATRIX[value.op].axes(value, operands)


def takes_eigenvectors(rule: RuleData) -> bool:
    """Whether a rule has eigenvectors of a matrix, which are determined where it has full rank."""
    return any(inside(each).op is Op.EIGH for each in walk(rule.expressions))


def matrices(value: Node) -> int:
    """The number of operands of a matrix function that are matrices: the first ones."""
    return matrix_operands(value, MATRIX[value.op].matrices)


def _block_axes(value: Node, operands: Sequence[Axes], one: Callable[[Node], Node]) -> Axes:
    """The axes of a function of blocks of rows: the axes of its result for one block, with the rows of all."""
    (size,), first = statics(value), operands[0]
    rows, cols = (x or const(1) for x in (first.rows, first.cols))
    blocks = node(Op.DIV, rows, size)
    of_block = [Axes(AXES, one(size), one(cols))]
    if matrices(value) == 2:
        second = operands[1]
        below = one(node(Op.DIV, node(Op.MUL, second.rows or const(1), size), rows))
        of_block.append(Axes(AXES, below, one(second.cols or const(1))))
    of_block += operands[len(of_block) :]
    try:
        result = matrix_axes(inside(value), of_block)
    except RuleError as error:
        message = error.message.replace(repr(short_text(inside(value))), repr(short_text(value)))
        raise RuleError(f"{message}, in blocks of {short_text(size)} rows") from None
    return Axes(AXES, one(node(Op.MUL, blocks, result.rows or const(1))), result.cols)


def _product_axes(value: Node, operands: Sequence[Axes]) -> Axes:
    first, second = operands
    if first.cols is not second.rows:
        raise RuleError(f"the inner sides of {short_text(value)!r} differ")
    return Axes(AXES, first.rows, second.cols)


def _whole(value: Node, operand: Axes) -> Node:
    """The extent of the dimension of a function along one; RuleError where its operand is no whole tensor."""
    if not operand.elementwise:
        raise RuleError(
            f"{value.op.symbol} along an axis needs a tensor of the parameter's shape, and "
            f"{short_text(value.args[0])!r} has another"
        )
    return statics(value)[0]


def _mode_product_axes(value: Node, operands: Sequence[Axes]) -> Axes:
    extent, (first, second) = _whole(value, operands[0]), operands
    if second.rows is not extent or second.cols is not extent:
        sides = " by ".join("1" if x is None else short_text(x) for x in (second.rows, second.cols))
        raise RuleError(
            f"matmul along an axis needs a square matrix of its extent {short_text(extent)}, and "
            f"{short_text(value.args[1])!r} is {sides}: the product has the shape of the tensor. Project an axis by "
            f"'q @ transpose(q)', or the rows of matrices by 'transpose(q) @ x'"
        )
    return first


def _gram_axes(value: Node, operands: Sequence[Axes]) -> Axes:
    extent = _whole(value, operands[0])
    return Axes(AXES, extent, extent)


def _same_axes(_: Node, operands: Sequence[Axes]) -> Axes:
    return operands[0]


def _square_axes(value: Node, operands: Sequence[Axes]) -> Axes:
    first = operands[0]
    if first.rows is not first.cols:
        sides = " by ".join("1" if x is None else short_text(x) for x in (first.rows, first.cols))
        raise RuleError(f"{value.op.symbol} needs a square matrix, and {short_text(value.args[0])!r} is {sides}")
    return Axes(AXES, first.rows, first.rows)


def _diagonal_axes(value: Node, operands: Sequence[Axes]) -> Axes:
    (first,) = operands
    extent = first.rows if "i" in first.letters else first.cols
    if not {"i", "j"} & set(first.letters):
        raise RuleError(f"diag needs a matrix or a vector, and {short_text(value.args[0])!r} is neither")
    if {"i", "j"} <= set(first.letters):
        return Axes("knbi", _square_axes(value, operands).rows)
    return Axes(AXES, extent, extent)


def _vector_axes(value: Node, operands: Sequence[Axes]) -> Axes:
    first = operands[0]
    if len({"i", "j"} & set(first.letters)) != 1:
        raise RuleError(
            f"{value.op.symbol} needs one value for each row or column, and {short_text(value.args[0])!r} is something "
            f'else: reduce it with per="row", or compare elements with a quantile of them'
        )
    return first


def _quantile_axes(value: Node, operands: Sequence[Axes]) -> Axes:
    first, second = operands
    if not second.number:
        raise RuleError(
            f"q of quantile is one number for a tensor, and {short_text(value.args[1])!r} is something else: reduce it"
        )
    return axes_of_level(settings(value)["per"], first)


def _ordered_axes(value: Node, operands: Sequence[Axes]) -> Axes:
    (first,) = operands
    if first.number:
        raise RuleError(
            f"{value.op.symbol} needs a vector or a matrix, and {short_text(value.args[0])!r} is one number"
        )
    return first


def extent_of_level(level: str, axes: Axes) -> Node | None:
    """The number of elements along a level of a value with these axes; None where it is that of several matrices."""
    rows, cols = (x or const(1) for x in (axes.rows, axes.cols))
    if level == "tensor" and "b" in axes.letters:
        return node(Op.FACT, "numel") if axes.elementwise else None
    return {"row": cols, "col": rows}.get(level) or node(Op.MUL, rows, cols)


def _taken_axes(value: Node, operands: Sequence[Axes]) -> Axes:
    """The axes of the places along the level, and those of both operands across it."""
    first, second = _ordered_axes(node(value.op, value.args[0], value.arg), operands[:1]), operands[1]
    level = settings(value)["per"]
    across = {"row": "i", "col": "j", "matrix": "", "tensor": ""}[level]
    extents: dict[str, Node | None] = {}
    for letter, side in (("i", "rows"), ("j", "cols")):
        having = [getattr(x, side) for x in (second, *[first] * (letter == across)) if letter in x.letters]
        if any(x is not having[0] for x in having):
            raise RuleError(
                f"take needs as many {side} of places as of values, and those of {short_text(value)!r} differ"
            )
        if having:
            extents[letter] = having[0]
    batch = "b" in second.letters or ("b" in first.letters and level != "tensor")
    taken = {*extents, *("b" if batch else "")}
    letters = AXES if {"i", "j"} <= taken else "".join(c for c in AXES if c in {"k", "n", *taken})
    return Axes(letters, extents.get("i"), extents.get("j"))


def _slice_axes(value: Node, operands: Sequence[Axes]) -> Axes:
    first, (start, stop) = operands[0], statics(value)
    rows = settings(value)["axis"] == "rows"
    end = (first.rows if rows else first.cols) if stop is const(math.inf) else stop
    extent = difference(end or const(1), start)
    return Axes(AXES, extent, first.cols) if rows else Axes(AXES, first.rows, extent)


def _joined_axes(value: Node, operands: Sequence[Axes]) -> Axes:
    first, second = operands
    below = settings(value)["axis"] == 0
    ends, sides = (("rows", "cols"), ("cols", "rows"))[not below]
    if getattr(first, sides) is not getattr(second, sides):
        raise RuleError(f"concat needs matrices with the same {sides}, and those of {short_text(value)!r} differ")
    extents = [getattr(x, ends) or const(1) for x in operands]
    total = simplified(node(Op.ADD, *extents))
    return Axes(AXES, total, first.cols) if below else Axes(AXES, first.rows, total)


def _solved_axes(value: Node, operands: Sequence[Axes]) -> Axes:
    first, second = _square_axes(value, operands), operands[1]
    if first.rows is not second.rows:
        raise RuleError(
            f"solve needs as many rows on the right as on the left, and those of {short_text(value)!r} differ"
        )
    return second


#: Every matrix function. A backend's own table has the same keys.
MATRIX: Mapping[Op, MatrixFunction] = {
    op: MatrixFunction(axes, NUMPY_MATRIX[op], EXACT_MATRIX[op], matrices)
    for op, matrices, axes in (
        (Op.MATMUL, 2, _product_axes),
        (Op.MODE_PRODUCT, 2, _mode_product_axes),
        (Op.GRAM, 1, _gram_axes),
        (Op.TRANSPOSE, 1, lambda _, operands: Axes(AXES, operands[0].cols, operands[0].rows)),
        (Op.EYE, 0, lambda value, _: Axes(AXES, *statics(value), *statics(value))),
        (Op.DIAG, 0, _diagonal_axes),
        (Op.TRIU, 1, _same_axes),
        (Op.TRIL, 1, _same_axes),
        (Op.SLICE, 1, _slice_axes),
        (Op.CONCAT, 2, _joined_axes),
        (Op.SOLVE, 2, _solved_axes),
        (Op.CHOLESKY, 1, _square_axes),
        (Op.TOPK, 0, _vector_axes),
        (Op.QUANTILE, 0, _quantile_axes),
        (Op.SORT, 0, _ordered_axes),
        (Op.ARGSORT, 0, _ordered_axes),
        (Op.TAKE, 0, _taken_axes),
        (Op.NEWTON_SCHULZ, 1, _same_axes),
        (Op.QR, 1, _same_axes),
        (Op.EIGH, 1, _square_axes),
        (Op.SINGULAR_VECTORS, 1, lambda value, operands: Axes(AXES, operands[0].rows, *statics(value))),
        (Op.INVERSE_ROOT, 1, _square_axes),
        (Op.IN_BLOCKS, 1, _same_axes),
    )
} | {Op.INDEX: MatrixFunction(index_axes, numpy_index, exact_index, 0)}
