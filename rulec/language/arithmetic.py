"""What each elementwise operation means, on NumPy arrays and on mpmath numbers.

This is the definition; every backend is compared with it. NaN propagates through every operation, `where` takes
nothing from the branch not chosen, and the sign of NaN is NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rulec.language.node import Op

Table = Mapping[Op, Callable[..., Any]]


def _erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[float])(x)


def _sigmoid(x: Any) -> Any:
    """Without overflow on either side: exp only ever sees a number that is not positive."""
    small = np.exp(-np.abs(x))
    return np.where(np.signbit(x), small, 1.0) / (1.0 + small)


def _power(x: Any, y: Any) -> Any:
    """C99's pow. For one exponent of 0.5 NumPy takes the square root instead, which is -0 at -0 and NaN at -inf."""
    result = np.power(x, y)
    if np.size(y) == 1 and np.all(np.equal(y, 0.5)):
        return np.where(np.isneginf(x), -np.asarray(x), np.abs(result))
    return result


#: Operations on NumPy arrays, in the arrays' own dtype.
NUMPY: Table = {
    Op.ADD: np.add, Op.SUB: np.subtract, Op.MUL: np.multiply, Op.DIV: np.divide, Op.POW: _power,
    Op.MOD: np.mod, Op.FLOORDIV: lambda a, b: np.floor(np.divide(a, b)), Op.NEG: np.negative,
    Op.LT: np.less, Op.LE: np.less_equal, Op.GT: np.greater, Op.GE: np.greater_equal,
    Op.EQ: np.equal, Op.NE: np.not_equal,
    Op.AND: np.logical_and, Op.OR: np.logical_or, Op.NOT: np.logical_not,
    Op.WHERE: np.where, Op.SQRT: np.sqrt, Op.RSQRT: lambda x: 1.0 / np.sqrt(x), Op.CBRT: np.cbrt,
    Op.ABS: np.abs, Op.SIGN: np.sign, Op.EXP: np.exp, Op.LOG: np.log, Op.TANH: np.tanh,
    Op.SIGMOID: _sigmoid, Op.ERF: _erf, Op.FLOOR: np.floor, Op.ISFINITE: np.isfinite,
    Op.MINIMUM: np.minimum, Op.MAXIMUM: np.maximum,
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
    """The same operations on object arrays of 50-digit mpmath numbers; IEEE values at the edges."""
    return _MpmathTable(mpmath_context()).table()


class _MpmathTable:
    """Builds the mpmath operations: mpmath raises where IEEE arithmetic gives infinity or NaN."""

    def __init__(self, context: Any) -> None:
        self.mp = context

    def table(self) -> Table:
        mp = self.mp
        scalar: dict[Op, Callable[..., Any]] = {
            Op.ADD: lambda a, b: a + b, Op.SUB: lambda a, b: a - b, Op.MUL: lambda a, b: a * b,
            Op.DIV: self.divide, Op.POW: self.power, Op.MOD: lambda a, b: a - b * mp.floor(self.divide(a, b)),
            Op.FLOORDIV: lambda a, b: mp.floor(self.divide(a, b)), Op.NEG: lambda a: -a,
            Op.LT: lambda a, b: a < b, Op.LE: lambda a, b: a <= b, Op.GT: lambda a, b: a > b,
            Op.GE: lambda a, b: a >= b, Op.EQ: lambda a, b: a == b, Op.NE: lambda a, b: a != b,
            Op.AND: lambda a, b: bool(a) and bool(b), Op.OR: lambda a, b: bool(a) or bool(b), Op.NOT: lambda a: not a,
            Op.WHERE: lambda c, a, b: a if c else b,
            Op.SQRT: self.square_root, Op.RSQRT: lambda a: self.divide(mp.mpf(1), self.square_root(a)),
            Op.CBRT: lambda a: a if mp.isnan(a) else mp.sign(a) * mp.cbrt(abs(a)),
            Op.ABS: abs, Op.SIGN: lambda a: a if mp.isnan(a) else mp.sign(a), Op.EXP: mp.exp,
            Op.LOG: self.logarithm, Op.TANH: mp.tanh, Op.SIGMOID: lambda a: 1 / (1 + mp.exp(-a)), Op.ERF: mp.erf,
            Op.FLOOR: lambda a: mp.floor(a) if mp.isfinite(a) else a, Op.ISFINITE: mp.isfinite,
            Op.MINIMUM: lambda a, b: a + b if mp.isnan(a) or mp.isnan(b) else min(a, b),
            Op.MAXIMUM: lambda a, b: a + b if mp.isnan(a) or mp.isnan(b) else max(a, b),
        }  # fmt: skip
        return {
            op: np.frompyfunc(f, f.__code__.co_argcount if hasattr(f, "__code__") else 1, 1)
            for op, f in self._arity(scalar)
        }

    @staticmethod
    def _arity(scalar: dict[Op, Callable[..., Any]]) -> list[tuple[Op, Callable[..., Any]]]:
        def unary(f: Callable[..., Any]) -> Callable[..., Any]:
            return lambda a: f(a)

        single = (Op.ABS, Op.EXP, Op.TANH, Op.ERF, Op.ISFINITE, Op.SQRT, Op.LOG)
        double = {Op.DIV: lambda a, b: scalar[Op.DIV](a, b), Op.POW: lambda a, b: scalar[Op.POW](a, b)}
        return [(op, unary(f) if op in single else double.get(op, f)) for op, f in scalar.items()]

    def divide(self, a: Any, b: Any) -> Any:
        if b == 0:
            return self.mp.nan if a == 0 or self.mp.isnan(a) else self.mp.inf * self.mp.sign(a)
        return a / b

    def power(self, a: Any, b: Any) -> Any:
        if b == 0 or a == 1:
            return self.mp.mpf(1)
        if a == 0 and b < 0:
            return self.mp.inf
        if a == -self.mp.inf and not self.mp.isint(b):
            return self.mp.inf if b > 0 else self.mp.mpf(0)
        result = a**b
        return self.mp.nan if isinstance(result, self.mp.mpc) else result

    def square_root(self, a: Any) -> Any:
        return self.mp.nan if a < 0 else self.mp.sqrt(a)

    def logarithm(self, a: Any) -> Any:
        if a == 0:
            return -self.mp.inf
        return self.mp.nan if a < 0 else self.mp.log(a)
