"""The meaning of each elementwise operation, on NumPy arrays and on mpmath numbers, from its record.

This is the definition, and every backend is compared with it. NaN propagates through every operation, and the sign of
NaN is NaN. `where` takes nothing from the branch it does not choose.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from rulec.language.expr.node import Node, Op, extent, walk
from rulec.language.expr.ops import SPECS, having

Table = Mapping[Op, Callable[..., Any]]


#: Operations on NumPy arrays, in the arrays' own dtype.
NUMPY: Table = {op: spec.numpy or getattr(np, spec.array) for op, spec in SPECS.items()}


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
    numbers = Digits(mpmath_context())
    return {op: np.frompyfunc(numbers.meaning(op), SPECS[op].arity, 1) for op in having("digits")}


class Digits:
    """The operations on one number at a time, with infinity and NaN where mpmath would raise.

    mpmath numbers have no largest exponent. Numbers far beyond every float64 become infinity or zero here, so that
    exponents do not take memory without bound.
    """

    _FAR = 10**9

    def __init__(self, context: Any) -> None:
        self.mp = context

    def meaning(self, op: Op) -> Callable[..., Any]:
        """The operation: the function of its record, or one of these methods, or mpmath's."""
        digits = SPECS[op].digits
        if not isinstance(digits, str):
            return functools.partial(digits, self.mp)
        return cast(Callable[..., Any], getattr(self, digits, None) or getattr(self.mp, digits))

    def divide(self, a: Any, b: Any) -> Any:
        if b == 0:
            return self.mp.nan if a == 0 or self.mp.isnan(a) else self.mp.inf * self.mp.sign(a)
        return a / b

    def floor_divide(self, a: Any, b: Any) -> Any:
        return self.floor(self.divide(a, b))

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

    def sigmoid(self, a: Any) -> Any:
        return 1 / (1 + self.exponential(-a))

    def sine(self, a: Any) -> Any:
        return self.mp.sin(a) if self.mp.isfinite(a) else self.mp.nan

    def cosine(self, a: Any) -> Any:
        return self.mp.cos(a) if self.mp.isfinite(a) else self.mp.nan

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

    def inverse_square_root(self, a: Any) -> Any:
        return self.divide(self.mp.mpf(1), self.square_root(a))

    def logarithm(self, a: Any) -> Any:
        if a == 0:
            return -self.mp.inf
        return self.mp.nan if a < 0 else self.mp.log(a)


_NAMED = (Op.FACT, Op.HYPER, Op.NAME)


#: Operations with results too large for float64 for some finite operands.
_GROWING = having("grows")


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


def _lacks(dimension: float | None, known: Mapping[str, float]) -> bool:
    """Whether a tensor with these facts has no such dimension."""
    count = known.get("ndim")
    return dimension is not None and count is not None and not -count <= dimension < count


def _decided(op: Op, operands: Sequence[Any]) -> Any:
    """The truth of `and` or `or` by one operand alone; None where these operands leave it open."""
    if op is Op.AND and any(x == 0 for x in operands):
        return np.float64(0)
    return np.float64(1) if op is Op.OR and any(x != 0 for x in operands) else None


def number_known(value: Node, known: Mapping[str, float]) -> float | None:
    """The value of an expression in float64; None where a part of it is not known.

    `known` has values of names, hyper-parameters and shape facts. Reductions, matrix functions and random numbers are
    never known. A condition on a dimension that the tensor lacks is known where the rest of it decides, as in
    `ndim > 2 and dim(2) <= 100`.
    """
    values: dict[Node, Any] = {}
    absent: set[Node] = set()
    with np.errstate(all="ignore"):
        for part in walk([value]):
            if part.op is Op.CONST:
                values[part] = np.float64(cast(float, part.arg))
            elif part.op in _NAMED and part.arg in known:
                values[part] = np.float64(known[str(part.arg)])
            elif part.op is Op.DIM and (size := _extent(values.get(part.args[0]), known)) is not None:
                values[part] = np.float64(size)
            elif part.op is Op.DIM and _lacks(values.get(part.args[0]), known):
                absent.add(part)
            elif part.op in NUMPY and all(a in values for a in part.args):
                values[part] = np.float64(NUMPY[part.op](*(values[a] for a in part.args)))
            elif part.op in NUMPY and all(a in values or a in absent for a in part.args):
                truth = _decided(part.op, [values[a] for a in part.args if a in values])
                absent.add(part) if truth is None else values.setdefault(part, truth)
    return float(values[value]) if value in values else None
