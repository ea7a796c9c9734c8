"""Interval arithmetic on arrays: the range of every result on an inexact machine.

A `Range` holds, for each element, the least and the greatest number possible, and whether NaN is possible. So the
conformance suite derives its tolerances from the error of single operations, never by trial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.language.expr.arithmetic import NUMPY
from rulec.language.expr.node import Kind, Op
from rulec.language.expr.ops import having

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, and NaN where `nan`. Where `low > high` there is no number: surely NaN."""

    low: Array
    high: Array
    nan: Array

    @property
    def exact(self) -> Array:
        """True for elements with one possible value."""
        return np.asarray(((self.low == self.high) & ~self.nan) | self.surely_nan)

    @property
    def surely_nan(self) -> Array:
        """True for elements without a possible number."""
        return self.low > self.high

    def value(self) -> Array:
        """The value of `exact` elements; any number for others."""
        return np.where(self.surely_nan, np.nan, self.low)

    def holds(self, x: float) -> Array:
        """True for elements with `x` among their numbers."""
        return (self.low <= x) & (x <= self.high)


@dataclass(frozen=True)
class Truth:
    """Whether a condition may be true, and whether it may be false."""

    true: Array
    false: Array


def point(value: Any) -> Range:
    """The range of exactly these values."""
    array = np.asarray(value, np.float64)
    nan = np.isnan(array)
    return Range(np.where(nan, np.inf, array), np.where(nan, -np.inf, array), nan)


def between(low: Any, high: Any) -> Range:
    """The range of all numbers from `low` to `high`; surely NaN where one of them is NaN."""
    nan = np.isnan(low) | np.isnan(high)
    return Range(np.where(nan, np.inf, low), np.where(nan, -np.inf, high), nan)


def hull(*ranges: Range) -> Range:
    """The smallest range with all of the ranges in it."""
    return Range(
        np.minimum.reduce(np.broadcast_arrays(*(r.low for r in ranges))),
        np.maximum.reduce(np.broadcast_arrays(*(r.high for r in ranges))),
        np.logical_or.reduce(np.broadcast_arrays(*(r.nan for r in ranges))),
    )


def choose(condition: Array, a: Range, b: Range) -> Range:
    """`a` where the condition holds, else `b`."""
    return Range(
        np.where(condition, a.low, b.low), np.where(condition, a.high, b.high), np.where(condition, a.nan, b.nan)
    )


def widen(r: Range, ulps: float, eps: float, smallest: float, largest: float, flushes: bool) -> Range:
    """`r` after rounding with an error of at most `ulps` in a format.

    `eps` is the format's spacing above 1, `smallest` its smallest normal and `largest` its largest number. Zero stays
    exact. Below the smallest normal number the error is absolute. Numbers beyond the largest become infinity, and may
    stay finite in a fused multiply-add.
    """
    # 2**-52: the greatest error in the evaluation of the bounds themselves.
    relative = ulps * eps + 2.0**-52
    absolute = smallest if flushes else ulps * eps * smallest

    def slack(x: Array) -> Array:
        size = np.abs(x)
        near_zero = (size > 0) & (size < 2 * smallest)
        return np.where(np.isfinite(x), relative * size, 0.0) + np.where(near_zero, absolute, 0.0)

    low, high = r.low - slack(r.low), r.high + slack(r.high)
    low = np.where(low < -largest, -np.inf, np.minimum(low, np.where(r.low == np.inf, np.inf, largest)))
    high = np.where(high > largest, np.inf, np.maximum(high, np.where(r.high == -np.inf, -np.inf, -largest)))
    empty = r.surely_nan
    return Range(np.where(empty, np.inf, low), np.where(empty, -np.inf, high), r.nan)


def apply(op: Op, operands: Sequence[Any]) -> Any:
    """The range of an elementwise operation without rounding. Operands are Ranges, or Truths for truth values.

    FLOORDIV and RSQRT are not among them: they are two operations, each with a rounding of its own.
    """
    if op.kind is Kind.COMPARE:
        return _compare(op, *operands)
    if op.kind is Kind.LOGIC:
        return _logic(op, operands)
    if op is Op.WHERE:
        return _where(*operands)
    if op is Op.ISFINITE:
        (x,) = operands
        infinite = (x.low == -np.inf) | (x.high == np.inf)
        return Truth(~x.surely_nan & (x.low < np.inf) & (x.high > -np.inf), infinite | x.nan)
    general = _monotone(op, *operands) if op in _MONOTONE else _GENERAL[op](*operands)
    exact = np.logical_and.reduce(np.broadcast_arrays(*(x.exact for x in operands)))
    return choose(exact, point(NUMPY[op](*(x.value() for x in operands))), general)


def _compare(op: Op, a: Range, b: Range) -> Truth:
    nan, number = a.nan | b.nan, ~(a.surely_nan | b.surely_nan)
    if op in (Op.GT, Op.GE):
        return _compare(Op.LT if op is Op.GT else Op.LE, b, a)
    if op is Op.LT:
        return Truth(number & (a.low < b.high), nan | (a.high >= b.low))
    if op is Op.LE:
        return Truth(number & (a.low <= b.high), nan | (a.high > b.low))
    equal = number & (a.low <= b.high) & (b.low <= a.high)
    different = nan | ~(number & (a.low == a.high) & (b.low == b.high) & (a.low == b.low))
    return Truth(equal, different) if op is Op.EQ else Truth(different, equal)


def _logic(op: Op, operands: Sequence[Truth]) -> Truth:
    if op is Op.NOT:
        return Truth(operands[0].false, operands[0].true)
    a, b = operands
    if op is Op.AND:
        return Truth(a.true & b.true, a.false | b.false)
    return Truth(a.true | b.true, a.false & b.false)


def _where(condition: Truth, a: Any, b: Any) -> Any:
    if isinstance(a, Truth):
        return Truth((condition.true & a.true) | (condition.false & b.true),
                     (condition.true & a.false) | (condition.false & b.false))  # fmt: skip
    both = condition.true & condition.false
    return choose(both, hull(a, b), choose(condition.true, a, b))


def _add(a: Range, b: Range) -> Range:
    low, high = a.low + b.low, a.high + b.high
    opposite = (a.holds(np.inf) & b.holds(-np.inf)) | (a.holds(-np.inf) & b.holds(np.inf))
    # Infinities of opposite sign at an end: beyond them any number may be the sum.
    low, high = np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)
    return _or_nothing(Range(low, high, a.nan | b.nan | opposite), a, b)


def _negative(a: Range) -> Range:
    return Range(-a.high, -a.low, a.nan)


def _or_nothing(r: Range, *operands: Range) -> Range:
    """The range, without a number where an operand has none."""
    empty = np.logical_or.reduce(np.broadcast_arrays(*(x.surely_nan for x in operands)))
    return Range(np.where(empty, np.inf, r.low), np.where(empty, -np.inf, r.high), r.nan | empty)


def _corners(f: Callable[[Array, Array], Array], a: Range, b: Range) -> Range:
    """The range of an operation that is monotone in each operand: the hull of its values at their ends."""
    values = [f(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    nan = np.logical_or.reduce([np.isnan(v) for v in values])
    low = np.minimum.reduce([np.where(np.isnan(v), np.inf, v) for v in values])
    high = np.maximum.reduce([np.where(np.isnan(v), -np.inf, v) for v in values])
    return _or_nothing(Range(low, high, a.nan | b.nan | nan), a, b)


def _multiply(a: Range, b: Range) -> Range:
    r = _corners(np.multiply, a, b)
    infinite = [x.holds(np.inf) | x.holds(-np.inf) for x in (a, b)]
    undefined = (a.holds(0) & infinite[1]) | (b.holds(0) & infinite[0])
    # Zero times infinity at a corner says nothing of the numbers beside it.
    ends = choose(undefined, hull(r, point(0.0)), r)
    return _or_nothing(Range(ends.low, ends.high, r.nan | undefined), a, b)


def _divide(a: Range, b: Range) -> Range:
    r = _corners(np.divide, a, b)
    both_infinite = (a.holds(np.inf) | a.holds(-np.inf)) & (b.holds(np.inf) | b.holds(-np.inf))
    undefined = (a.holds(0) & b.holds(0)) | both_infinite
    # Only from +0 up, or from -0 down, do the quotients by zero and by the numbers beside it belong together.
    upwards, downwards = (b.low == 0) & ~np.signbit(b.low) & (b.high > 0), (b.high == 0) & np.signbit(b.high)
    any_sign = b.holds(0) & ~upwards & ~(downwards & (b.low < 0))
    ends = choose((any_sign | undefined) & ~r.surely_nan, Range(*map(np.asarray, (-np.inf, np.inf, False))), r)
    return _or_nothing(Range(ends.low, ends.high, r.nan | undefined), a, b)


def _absolute(a: Range) -> Range:
    low = np.where(a.holds(0), 0.0, np.minimum(np.abs(a.low), np.abs(a.high)))
    return _or_nothing(Range(low, np.maximum(np.abs(a.low), np.abs(a.high)), a.nan), a)


def _power(a: Range, b: Range) -> Range:
    """Exact where the base is not negative; else any number, and NaN unless the exponent is one whole number."""
    positive = Range(np.abs(np.maximum(a.low, 0.0)), a.high, a.nan)
    r = hull(_corners(NUMPY[Op.POW], positive, b), choose(b.holds(0), point(1.0), point(np.nan)))
    whole = (b.low == b.high) & (np.floor(b.low) == b.low)
    anything = Range(*map(np.asarray, (-np.inf, np.inf, False)))
    ends = choose(np.signbit(a.low), anything, r)
    return _or_nothing(Range(ends.low, ends.high, a.nan | b.nan | ((a.low < 0) & ~whole)), a, b)


def _modulo(a: Range, b: Range) -> Range:
    """Between zero and the divisor: where the dividend is not exact, the quotient may be another."""
    undefined = b.holds(0) | a.holds(np.inf) | a.holds(-np.inf)
    return _or_nothing(Range(np.minimum(b.low, 0.0), np.maximum(b.high, 0.0), a.nan | b.nan | undefined), a, b)


def _pairwise(f: Callable[[Array, Array], Array]) -> Callable[[Range, Range], Range]:
    def combine(a: Range, b: Range) -> Range:
        return _or_nothing(Range(f(a.low, b.low), f(a.high, b.high), a.nan | b.nan), a, b)

    return combine


def _of_sizes(op: Op) -> Callable[..., Range]:
    """An operation that never decreases with the sizes of its operands: of infinity beside NaN it may be infinite."""

    def combine(*operands: Range) -> Range:
        sizes = [_absolute(x) for x in operands]
        if len(sizes) == 1:
            return sizes[0]
        r = _corners(NUMPY[op], *sizes)
        infinite = np.logical_or.reduce(np.broadcast_arrays(*(x.high == np.inf for x in sizes)))
        return choose(infinite & r.surely_nan, Range(*map(np.asarray, (np.inf, np.inf, True))), r)

    return combine


#: Operations that never decrease -> the least number of their domain.
_MONOTONE: dict[Op, float] = having("rises")


def _monotone(op: Op, x: Range) -> Range:
    first = _MONOTONE[op]
    outside = x.high < first
    # A library's function may decrease by a last place between neighbours: NumPy's cbrt does on some processors.
    ends = [NUMPY[op](np.where(outside, 1.0, np.maximum(end, first))) for end in (x.low, x.high)]
    low, high = np.minimum(*ends), np.maximum(*ends)
    empty = outside | x.surely_nan
    return Range(np.where(empty, np.inf, low), np.where(empty, -np.inf, high), x.nan | (x.low < first) | empty)


def _wave(op: Op) -> Callable[[Range], Range]:
    """Sine or cosine: a number's differs from another's by no more than the numbers do. NaN at infinity."""

    def wave(x: Range) -> Range:
        infinite = x.holds(np.inf) | x.holds(-np.inf)
        middle = NUMPY[op](np.where(infinite, 0.0, x.low))
        width = np.where(infinite, 2.0, np.where(x.low < x.high, x.high - x.low + 2.0**-50, 0.0))
        r = Range(np.maximum(middle - width, -1.0), np.minimum(middle + width, 1.0), x.nan | infinite)
        return _or_nothing(r, x)

    return wave


_GENERAL: dict[Op, Callable[..., Range]] = {
    Op.ADD: _add, Op.SUB: lambda a, b: _add(a, _negative(b)), Op.MUL: _multiply, Op.DIV: _divide, Op.POW: _power,
    Op.MOD: _modulo, Op.NEG: _negative, Op.MINIMUM: _pairwise(np.minimum),
    Op.MAXIMUM: _pairwise(np.maximum), Op.SIN: _wave(Op.SIN), Op.COS: _wave(Op.COS),
    **{op: _of_sizes(op) for op in having("of_sizes")},
}  # fmt: skip
