"""The functions of the language that are made of its operations: every backend has them, with the operations' bits."""

from __future__ import annotations

from rulec.language.expr.levels import Level, reduction
from rulec.language.expr.node import Node, Op, const, node

_ONE, _HALF = const(1), const(0.5)


def clip(x: Node, low: Node, high: Node) -> Node:
    """`x` limited to a range; `high` where the ends cross."""
    return node(Op.MINIMUM, node(Op.MAXIMUM, x, low), high)


def median(a: Node, b: Node, c: Node) -> Node:
    """The middle one of three values; NaN where one of them is NaN."""
    return node(Op.MAXIMUM, node(Op.MINIMUM, a, b), node(Op.MINIMUM, node(Op.MAXIMUM, a, b), c))


def rounded(x: Node) -> Node:
    """The nearest whole number, of two the even one; a zero is positive where `x` is not zero.

    The distance from the whole number below is exact wherever a half is near.
    """
    below = node(Op.FLOOR, x)
    rest = node(Op.SUB, x, below)
    odd = node(Op.NE, node(Op.MUL, const(2), node(Op.FLOOR, node(Op.MUL, _HALF, below))), below)
    up = node(Op.OR, node(Op.GT, rest, _HALF), node(Op.AND, node(Op.EQ, rest, _HALF), odd))
    return node(Op.WHERE, up, node(Op.ADD, below, _ONE), below)


def arc_tangent(x: Node) -> Node:
    """The angle of the point (1, x)."""
    return node(Op.ATAN2, x, _ONE)


def softplus(x: Node) -> Node:
    """`log(1 + exp(x))` without overflow.

    1 + exp(-|x|) is rounded; the derivative of the logarithm there, times the part lost, is added to its logarithm.
    """
    small = node(Op.EXP, node(Op.NEG, node(Op.ABS, x)))
    total = node(Op.ADD, _ONE, small)
    lost = node(Op.SUB, small, node(Op.SUB, total, _ONE))
    logarithm = node(Op.ADD, node(Op.LOG, total), node(Op.DIV, lost, total))
    return node(Op.ADD, node(Op.MAXIMUM, x, const(0)), logarithm)


def softmax(x: Node, per: str | Level) -> Node:
    """Exponentials over their sum at a level; the largest exponent is 0."""
    grown = node(Op.EXP, node(Op.SUB, x, reduction(Op.MAX, x, per)))
    return node(Op.DIV, grown, reduction(Op.SUM, grown, per))


def variance(x: Node, per: str | Level) -> Node:
    """The mean of the squared distances from the mean, at a level."""
    distance = node(Op.SUB, x, reduction(Op.MEAN, x, per))
    return reduction(Op.MEAN, node(Op.MUL, distance, distance), per)


def deviation(x: Node, per: str | Level) -> Node:
    """The root of the variance."""
    return node(Op.SQRT, variance(x, per))
