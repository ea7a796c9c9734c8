"""Constant folding: only identities true for every IEEE number, signed zeros, infinities and NaN included.

They also keep a value's axes: `where(g > 0, a, a)` has one value per element, though all are the same, and its sum
counts the elements.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rulec.language.expr.arithmetic import NUMPY
from rulec.language.expr.node import Kind, Node, Op, const, is_boolean, node


def fold_node(value: Node) -> Node:
    """The simplest node with the same value. The operands are folded already."""
    if value.op.kind in (Kind.ARITHMETIC, Kind.FUNCTION) and value.args and all(a.op is Op.CONST for a in value.args):
        return _fold_constant(value)
    return _fold_identity(value) if value.op.kind is Kind.ARITHMETIC else value


def _fold_constant(value: Node) -> Node:
    if is_boolean(value) or value.op is Op.WHERE:
        return value
    with np.errstate(all="ignore"):
        operands = [np.float64(a.arg) for a in value.args]  # type: ignore[arg-type]
        return const(float(NUMPY[value.op](*operands)))


def _is(value: Node, number: float) -> bool:
    return value.op is Op.CONST and value.arg == number


def _fold_identity(value: Node) -> Node:
    left = value.args[0]
    right = value.args[-1]
    if value.op is Op.MUL and (_is(left, 1) or _is(right, 1)):
        return right if _is(left, 1) else left
    if value.op in (Op.DIV, Op.POW) and _is(right, 1):
        return left
    # x - 0 is x for every x; x + 0 is not (-0 + 0 is +0).
    if value.op is Op.SUB and _is(right, 0) and str(right.arg) != "-0.0":
        return left
    if value.op is Op.NEG and left.op is Op.NEG:
        return left.args[0]
    if value.op is Op.POW and right.op is Op.CONST and right.arg in _SMALL_POWERS:
        return _SMALL_POWERS[right.arg](left)
    return value


def _times(a: Node, b: Node) -> Node:
    return node(Op.MUL, a, b)


#: Powers as products: exact for the square, and within an ulp of a correctly rounded power for the others.
_SMALL_POWERS: dict[object, Callable[[Node], Node]] = {
    2.0: lambda x: _times(x, x),
    3.0: lambda x: _times(_times(x, x), x),
    4.0: lambda x: _times(_times(x, x), _times(x, x)),
}
