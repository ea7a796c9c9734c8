"""The meaning of each elementwise operation, on NumPy arrays and on mpmath numbers.

This is the definition, and every backend is compared with it. NaN propagates through every operation, and the sign of
NaN is NaN. `where` takes nothing from the branch it does not choose.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from rulec.language.expr.node import Node, Op, extent, walk

Table = Mapping[Op, Callable[..., Any]]


def _erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.asarray(x).dtype])(x)


def _sigmoid(x: Any) -> Any:
    """The logistic function without overflow: exp sees only numbers up to 0."""
    small = np.exp(-np.abs(x))
    return np.where(np.signbit(x), small, 1.0) / (1.0 + small)


def _power(x: Any, y: Any) -> Any:
    """C99's pow. For one exponent of 0.5 NumPy takes the square root instead, which is -0 at -0 and NaN at -inf."""
    result = np.power(x, y)
    if np.size(y) == 1 and np.all(np.equal(y, 0.5)):
        return np.where(np.isneginf(x), -np.asarray(x), np.abs(result))
    return result


def _angle(y: Any, x: Any) -> Any:
    """The angle of the point (x, y), as though zeros had no sign: 0 + -0 is 0."""
    return np.arctan2(np.add(y, 0.0), np.add(x, 0.0))


def _bits(x: Any) -> Any:
    """The bits of numbers in float32."""
    return np.asarray(x, np.float32).view(np.int32)


def _away(x: Any, count: Any) -> Any:
    return (_bits(x) + np.asarray(count).astype(np.int32)).view(np.float32)


def _coarse(x: Any, count: Any) -> Any:
    cleared = _bits(_away(x, count)) & np.int32(-0x10000)
    return np.where(np.isfinite(x), cleared.view(np.float32), np.asarray(x, np.float32))


#: Operations on NumPy arrays, in the arrays' own dtype.
NUMPY: Table = {
    Op.ADD: np.add, Op.SUB: np.subtract, Op.MUL: np.multiply, Op.DIV: np.divide, Op.POW: _power,
    Op.MOD: np.mod, Op.FLOORDIV: lambda a, b: np.floor(np.divide(a, b)), Op.NEG: np.negative,
    Op.LT: np.less, Op.LE: np.less_equal, Op.GT: np.greater, Op.GE: np.greater_equal,
    Op.EQ: np.equal, Op.NE: np.not_equal,
    Op.AND: np.logical_and, Op.OR: np.logical_or, Op.NOT: np.logical_not,
    Op.WHERE: np.where, Op.SQRT: np.sqrt, Op.RSQRT: lambda x: 1.0 / np.sqrt(x), Op.CBRT: np.cbrt,
    Op.ABS: np.abs, Op.SIGN: np.sign, Op.EXP: np.exp, Op.LOG: np.log, Op.TANH: np.tanh,
    Op.SIGMOID: _sigmoid, Op.ERF: _erf, Op.SIN: np.sin, Op.COS: np.cos, Op.ATAN2: _angle, Op.FLOOR: np.floor,
    Op.ISFINITE: np.isfinite,
    Op.MINIMUM: np.minimum, Op.MAXIMUM: np.maximum, Op.AWAY: _away, Op.COARSE: _coarse,
    Op.ULPS: lambda x, y: np.where(np.isnan(x), 0, _bits(x) - _bits(y)).astype(np.float32),
}  # fmt: skip


@functools.cache
def mpmath_context() -> Any:
    """mpmath with 50 digits, apart from mpmath's own global precision."""
    import mpmath

    context = mpmath.mp.clone()
    context.dps = 50
    return context


@functools.cache
def mpmath_table() -> Table:
    """The same operations on object arrays of 50-digit mpmath numbers, as in IEEE 754 but without a sign of zero."""
    operations = _Mpmath(mpmath_context())
    table = {Op.WHERE: np.frompyfunc(lambda c, a, b: a if c else b, 3, 1)}
    table |= {op: np.frompyfunc(function, 1, 1) for op, function in operations.unary().items()}
    return table | {op: np.frompyfunc(function, 2, 1) for op, function in operations.binary().items()}


class _Mpmath:
    """The operations on one number at a time, with infinity and NaN where mpmath would raise.

    mpmath numbers have no largest exponent. Numbers far beyond every float64 become infinity or zero here, so that
    exponents do not take memory without bound.
    """

    _FAR = 10**9

    def __init__(self, context: Any) -> None:
        self.mp = context

    def unary(self) -> dict[Op, Callable[[Any], Any]]:
        """The operations of one number."""
        mp = self.mp
        return {
            Op.NEG: lambda a: -a, Op.NOT: lambda a: not a, Op.ABS: abs,
            Op.SIGN: lambda a: a if mp.isnan(a) else mp.sign(a),
            Op.SQRT: self.square_root, Op.RSQRT: lambda a: self.divide(mp.mpf(1), self.square_root(a)),
            Op.CBRT: lambda a: a if mp.isnan(a) else mp.sign(a) * mp.cbrt(abs(a)), Op.EXP: self.exponential,
            Op.LOG: self.logarithm, Op.TANH: mp.tanh, Op.SIGMOID: lambda a: 1 / (1 + self.exponential(-a)),
            Op.ERF: mp.erf, Op.SIN: lambda a: self.wave(mp.sin, a), Op.COS: lambda a: self.wave(mp.cos, a),
            Op.FLOOR: self.floor, Op.ISFINITE: mp.isfinite,
        }  # fmt: skip

    def binary(self) -> dict[Op, Callable[[Any, Any], Any]]:
        """The operations of two numbers."""
        return {
            Op.ADD: operator.add, Op.SUB: operator.sub, Op.MUL: operator.mul, Op.DIV: self.divide, Op.POW: self.power,
            Op.MOD: self.modulo, Op.FLOORDIV: lambda a, b: self.floor(self.divide(a, b)),
            Op.LT: operator.lt, Op.LE: operator.le, Op.GT: operator.gt, Op.GE: operator.ge,
            Op.EQ: operator.eq, Op.NE: operator.ne, Op.ATAN2: self.angle,
            Op.AND: lambda a, b: bool(a) and bool(b), Op.OR: lambda a, b: bool(a) or bool(b),
            Op.MINIMUM: lambda a, b: a + b if self.mp.isnan(a) or self.mp.isnan(b) else min(a, b),
            Op.MAXIMUM: lambda a, b: a + b if self.mp.isnan(a) or self.mp.isnan(b) else max(a, b),
        }  # fmt: skip

    def divide(self, a: Any, b: Any) -> Any:
        if b == 0:
            return self.mp.nan if a == 0 or self.mp.isnan(a) else self.mp.inf * self.mp.sign(a)
        return a / b

    def modulo(self, a: Any, b: Any) -> Any:
        """The remainder of a division rounded down. It has the sign of `b`, as in NumPy and Python."""
        if b == 0 or self.mp.isnan(a) or self.mp.isnan(b) or self.mp.isinf(a):
            return self.mp.nan
        if self.mp.isinf(b):
            return a if a == 0 or (a > 0) == (b > 0) else b
        return a % b

    def power(self, a: Any, b: Any) -> Any:
        if b == 0 or a == 1:
            return self.mp.mpf(1)
        if self.mp.isnan(a) or self.mp.isnan(b):
            return self.mp.nan
        whole = self.mp.isinf(b) or self.mp.isint(b)
        if a < 0 and not whole and not self.mp.isinf(a):
            return self.mp.nan
        size = self._positive_power(abs(a), b)
        odd = whole and self.mp.isfinite(b) and b % 2 == 1
        return -size if a < 0 and odd else size

    def _positive_power(self, a: Any, b: Any) -> Any:
        if a == 1:
            return self.mp.mpf(1)
        grows = (a > 1) == (b > 0)
        if a == 0 or self.mp.isinf(a) or self.mp.isinf(b) or abs(b * self.mp.log(a)) > self._FAR:
            return self.mp.inf if grows else self.mp.mpf(0)
        return a**b

    def exponential(self, a: Any) -> Any:
        if self.mp.isnan(a):
            return a
        return self.mp.inf if a > self._FAR else self.mp.mpf(0) if a < -self._FAR else self.mp.exp(a)

    def wave(self, function: Callable[[Any], Any], a: Any) -> Any:
        return function(a) if self.mp.isfinite(a) else self.mp.nan

    def angle(self, y: Any, x: Any) -> Any:
        if self.mp.isnan(y) or self.mp.isnan(x):
            return self.mp.nan
        if self.mp.isinf(x) and self.mp.isinf(y):
            y, x = self.mp.sign(y), self.mp.sign(x)
        return self.mp.atan2(y, x)

    def floor(self, a: Any) -> Any:
        return self.mp.floor(a) if self.mp.isfinite(a) else a

    def square_root(self, a: Any) -> Any:
        return self.mp.nan if a < 0 else self.mp.sqrt(a)

    def logarithm(self, a: Any) -> Any:
        if a == 0:
            return -self.mp.inf
        return self.mp.nan if a < 0 else self.mp.log(a)


_NAMED = (Op.FACT, Op.HYPER, Op.NAME)


#: Operations with results too large for float64 for some finite operands.
_GROWING = (Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.POW, Op.EXP)


class ConstantError(ValueError):
    """A constant too large for float64. The parser adds the place."""


def constant(op: Op, operands: Sequence[float]) -> float:
    """The result of an elementwise operation on constants, in float64: no power is ever computed exactly.

    Raises ConstantError where the operands are finite and the result is too large. A division by zero is infinite, as
    in IEEE 754.
    """
    with np.errstate(all="ignore"):
        number = float(NUMPY[op](*map(np.float64, operands)))
    pole = (op is Op.DIV and operands[1] == 0) or (op is Op.POW and operands[0] == 0)
    if op in _GROWING and math.isinf(number) and all(map(math.isfinite, operands)) and not pole:
        raise ConstantError("this number is larger than a float64 can hold: write inf for infinity")
    return number


def _extent(dimension: float | None, known: Mapping[str, float]) -> float | None:
    """The extent of a dimension, counted from the end where negative; None where it is not known."""
    count = known.get("ndim")
    if dimension is None or count is None or not float(dimension).is_integer():
        return None
    return known.get(extent(int(dimension + count if dimension < 0 else dimension)))


def number_known(value: Node, known: Mapping[str, float]) -> float | None:
    """The value of an expression in float64; None where a part of it is not known.

    `known` has values of names, hyper-parameters and shape facts. Reductions, matrix functions and random numbers are
    never known.
    """
    values: dict[Node, Any] = {}
    with np.errstate(all="ignore"):
        for part in walk([value]):
            if part.op is Op.CONST:
                values[part] = np.float64(cast(float, part.arg))
            elif part.op in _NAMED and part.arg in known:
                values[part] = np.float64(known[str(part.arg)])
            elif part.op is Op.DIM and (size := _extent(values.get(part.args[0]), known)) is not None:
                values[part] = np.float64(size)
            elif part.op in NUMPY and all(a in values for a in part.args):
                values[part] = np.float64(NUMPY[part.op](*(values[a] for a in part.args)))
    return float(values[value]) if value in values else None
