"""Truth values and numbers, constant folding, and trigonometric functions from operations that every backend has.

Folding uses only identities that hold for every IEEE number, signed zeros, infinities and NaN included. They also keep
a value's axes: `where(g > 0, a, a)` has one value per element, though all are the same, and its sum counts the
elements.

Sine, cosine and the arc tangent of two values call no library's function. Their polynomials interpolate the functions
at Chebyshev's nodes, to 6e-17 of the result, and serve float32 and float64. tests/compiler/test_trigonometry.py
measures the error in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rulec.language.expr.arithmetic import NUMPY
from rulec.language.expr.node import WAVES, Kind, Node, Op, const, is_boolean, node


def as_number(value: Node) -> Node:
    """The value as a number: a truth value is 1 or 0."""
    return node(Op.WHERE, value, const(1), const(0)) if is_boolean(value) else value


def as_truth(value: Node) -> Node:
    """The value as a truth value: a number is true unless it is 0."""
    return value if is_boolean(value) else node(Op.NE, value, const(0))


def with_operands_of_kind(value: Node) -> Node:
    """Operands of the right kind: truth values as 1 and 0 where numbers belong, and numbers as truth values."""
    if value.op.kind is Kind.LOGIC:
        return node(value.op, *map(as_truth, value.args))
    if value.op is Op.WHERE:
        same = is_boolean(value.args[1]) == is_boolean(value.args[2])
        return node(Op.WHERE, as_truth(value.args[0]), *(value.args[1:] if same else map(as_number, value.args[1:])))
    return node(value.op, *map(as_number, value.args), value.arg) if any(map(is_boolean, value.args)) else value


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


#: The largest size of a number whose sine is computed; that of a larger one is NaN. It is 63,662 quarters of a turn.
LARGEST = 1e5

# (sin(r)/r - 1)/r**2, (cos(r) - 1 + r**2/2)/r**4 and (atan(q)/q - 1)/q**2, in powers of r**2 and q**2, for |r| up to
# 0.79 and |q| up to 1.
_SINE = (
    -0.16666666666666666, 0.008333333333333331, -0.00019841269841264567, 2.7557319218954762e-06, -2.505210610025599e-08,
    1.6058510875319195e-10, -7.585486485235938e-13,
)  # fmt: skip
_COSINE = (
    0.041666666666666664, -0.0013888888888887241, 2.480158729853226e-05, -2.7557317151858866e-07,
    2.0876121534608454e-09, -1.1380868171449914e-11,
)  # fmt: skip
_ARC = (
    -0.3333333333333333, 0.19999999999999554, -0.14285714285648404, 0.11111111107234799, -0.09090908969557403,
    0.07692305354678655, -0.06666636435777692, 0.05882074956371294, -0.05261265735709454, 0.04752086773576656,
    -0.04308119655330471, 0.03872640214042632, -0.033750132001619734, 0.027567942297344678, -0.020238706986393514,
    0.012756172907694298, -0.006575683344151699, 0.002622977891906089, -0.0007518472526973822, 0.0001368724853148122,
    -1.1832505417555692e-05,
)  # fmt: skip

#: A quarter of a turn as a sum. A number of quarters below 2**16 times a part of 8 bits is exact in float32.
_QUARTER = (
    1.5703125, 0.0004825592041015625, 1.2665987014770508e-06, 9.89530235528946e-10, 2.5579538487363607e-12,
    5.390302858158119e-15,
)  # fmt: skip


def of_operations(value: Node, foreseen: bool) -> Node:
    """The value of a sine, a cosine or an arc tangent without these; a wave `foreseen` before a step, as it is."""
    if value.op is Op.ATAN2:
        return _arc_tangent(*value.args)
    return value if value.op not in WAVES or foreseen else _wave(value.args[0], value.op is Op.COS)


def _n(op: Op, *args: Node | float) -> Node:
    return fold_node(node(op, *(a if isinstance(a, Node) else const(a) for a in args)))


def _polynomial(x: Node, coefficients: Sequence[float]) -> Node:
    """The polynomial with these coefficients, the constant first."""
    *lower, last = coefficients
    total = const(last)
    for coefficient in reversed(lower):
        total = _n(Op.ADD, _n(Op.MUL, total, x), coefficient)
    return total


def _wave(x: Node, is_cosine: bool) -> Node:
    """The sine or cosine of `x`: quarters of a turn are taken away, and polynomials of the rest `r` are chosen from."""
    quarters = _n(Op.FLOOR, _n(Op.ADD, _n(Op.MUL, x, 2 / math.pi), 0.5))
    r = x
    for part in _QUARTER:
        r = _n(Op.SUB, r, _n(Op.MUL, quarters, part))
    square = _n(Op.MUL, r, r)
    sine = _n(Op.ADD, r, _n(Op.MUL, _n(Op.MUL, r, square), _polynomial(square, _SINE)))
    fourth = _n(Op.MUL, _n(Op.MUL, square, square), _polynomial(square, _COSINE))
    cosine = _n(Op.ADD, _n(Op.SUB, 1, _n(Op.MUL, 0.5, square)), fourth)
    turned = _n(Op.ADD, quarters, 1) if is_cosine else quarters
    quadrant = _n(Op.SUB, turned, _n(Op.MUL, 4, _n(Op.FLOOR, _n(Op.MUL, 0.25, turned))))
    is_odd = _n(Op.OR, _n(Op.EQ, quadrant, 1), _n(Op.EQ, quadrant, 3))
    size = _n(Op.WHERE, is_odd, cosine, sine)
    wave = _n(Op.WHERE, _n(Op.GE, quadrant, 2), _n(Op.NEG, size), size)
    return _n(Op.WHERE, _n(Op.LE, _n(Op.ABS, x), LARGEST), wave, math.nan)


def _arc_tangent(y: Node, x: Node) -> Node:
    """The angle of the point (x, y), as though zeros had no sign; 0 at the origin.

    The polynomial is of the ratio of the smaller to the larger coordinate, which is 1 where both are infinite.
    """
    height, width = _n(Op.ABS, y), _n(Op.ABS, x)
    small, large = _n(Op.MINIMUM, height, width), _n(Op.MAXIMUM, height, width)
    same = _n(Op.WHERE, _n(Op.GT, large, 0), 1, 0)
    ratio = _n(Op.WHERE, _n(Op.EQ, small, large), same, _n(Op.DIV, small, large))
    square = _n(Op.MUL, ratio, ratio)
    angle = _n(Op.ADD, ratio, _n(Op.MUL, _n(Op.MUL, ratio, square), _polynomial(square, _ARC)))
    angle = _n(Op.WHERE, _n(Op.GT, height, width), _n(Op.SUB, math.pi / 2, angle), angle)
    if x.op is not Op.CONST or not float(x.arg) >= 0:  # type: ignore[arg-type]
        angle = _n(Op.WHERE, _n(Op.LT, x, 0), _n(Op.SUB, math.pi, angle), angle)
    return _n(Op.WHERE, _n(Op.LT, y, 0), _n(Op.NEG, angle), angle)
