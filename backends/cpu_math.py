"""Elementary functions without branches, so that a loop that calls them vectorises: float32 and float64.

Every function takes any float (zero, subnormal, infinite, NaN) and returns what IEEE 754 and C99 Annex F say; the
greatest error is stated in ulps of the result, and tests/backends/test_cpu_math.py measures it.
"""

from __future__ import annotations

import math

from .cpu_lanes import Real, Truth, Whole, floor, fma, polynomial, rint, sqrt, where, with_sign_of
from .cpu_tables import TABLES, Table

_LOG2_E = 1.4426950408889634
_ROOT_HALF = 0.7071067811865476
_TWO_THIRDS = 0.6666666666666666


def _table(x: Real) -> Table:
    return TABLES[x.unit.form]


def _real_of(count: Whole) -> Real:
    """A small integer (two's complement, far below 2**fraction) as a real, without a conversion instruction.

    Adding it to the bits of 1.5*2**fraction adds it to that number; AVX2 converts no 64-bit integers.
    """
    form = count.unit.form
    magic = 1.5 * 2.0**form.fraction
    return (count + form.pattern(magic)).as_real() - magic


def _whole_of(count: Real) -> Whole:
    """A small integral real as an integer: the way back of `_real_of`."""
    form = count.unit.form
    magic = 1.5 * 2.0**form.fraction
    return (count + magic).bits() - form.pattern(magic)


def _power_of_two(count: Whole) -> Real:
    """2**count for a count between the exponents of the normal numbers."""
    form = count.unit.form
    return ((count + form.bias) << form.fraction).as_real()


def _times_power_of_two(x: Real, count: Real) -> Real:
    """`x * 2**count` where the result may be subnormal or overflow; rounded once. |count| below twice the bias."""
    half = floor(count * 0.5)
    return x * _power_of_two(_whole_of(half)) * _power_of_two(_whole_of(count - half))


def _between(x: Real, low: float, high: float) -> Real:
    """`x` moved into [low, high]; NaN stays NaN."""
    x = where(x < low, low, x)
    return where(x > high, high, x)


def _reduced(x: Real, low: Real | float = 0.0) -> tuple[Real, Real]:
    """(n, r) with `x + low = n*log(2) + r`, |r| <= log(2)/2 and a little; `low` is a correction below an ulp of x."""
    table = _table(x)
    count = rint(x * _LOG2_E)
    rest = fma(count, -table.ln2_high, x)
    return count, fma(count, -table.ln2_low, rest) + low


def exp(x: Real) -> Real:
    """The exponential: at most 1 ulp."""
    table = _table(x)
    x = _between(x, table.exp_low, table.exp_high)
    count, rest = _reduced(x)
    return _times_power_of_two(_exp_of_rest(rest), count)


def _exp_of_rest(rest: Real) -> Real:
    """exp(rest) for |rest| <= log(2)/2."""
    return fma(rest * rest, polynomial(rest, _table(rest).exp), rest) + 1.0


def sign(x: Real) -> Real:
    """1, -1 or 0 by the sign of `x`; NaN for NaN."""
    return where(x > 0.0, 1.0, where(x < 0.0, -1.0, where(x.is_nan(), x, 0.0)))


def isfinite(x: Real) -> Truth:
    """Neither infinite nor NaN."""
    return abs(x) < math.inf


def minimum(a: Real, b: Real) -> Real:
    """The smaller; NaN where either is."""
    return where((a < b) | a.is_nan(), a, b)


def maximum(a: Real, b: Real) -> Real:
    """The larger; NaN where either is."""
    return where((a > b) | a.is_nan(), a, b)


def remainder(a: Real, b: Real) -> Real:
    """`a - b*floor(a/b)` without rounding, with the sign of `b`. Calls the C library: a loop with it stays scalar."""
    rest = a.unit.remainder(a, b)
    other_side = ((rest < 0.0) ^ (b < 0.0)) & ~rest.equals(0.0)
    return where(rest.equals(0.0), with_sign_of(rest, b), where(other_side, rest + b, rest))


def square(x: Real) -> Real:
    """x**2, correctly rounded."""
    return x * x


def cube(x: Real) -> Real:
    """x**3: at most 1 ulp."""
    return x * x * x


def fourth(x: Real) -> Real:
    """x**4: at most 2 ulp."""
    return square(square(x))


def inverse(x: Real) -> Real:
    """x**-1, correctly rounded."""
    return 1.0 / x


def inverse_square(x: Real) -> Real:
    """x**-2: at most 2 ulp. The inverse comes first: the square of a large or small `x` would leave the range."""
    return square(1.0 / x)


def root(x: Real) -> Real:
    """x**0.5, correctly rounded: unlike the square root, +0 at -0 and +inf at -inf."""
    return where(x.equals(-math.inf), math.inf, sqrt(x) + 0.0)


def inverse_root(x: Real) -> Real:
    """x**-0.5: at most 1.5 ulp; +inf at -0 and 0 at -inf."""
    return 1.0 / root(x)


def _expm1(x: Real) -> Real:
    """exp(x) - 1 for 0 <= x below the overflow of exp; relative error of the small results as of the large."""
    count, rest = _reduced(x)
    small = fma(rest * rest, polynomial(rest, _table(x).exp), rest)
    scale = _power_of_two(_whole_of(count))
    return fma(scale, small, scale - 1.0)


def tanh(x: Real) -> Real:
    """The hyperbolic tangent: at most 2.5 ulp."""
    size = _between(abs(x), 0.0, _table(x).tanh_one)
    grown = _expm1(size + size)
    return with_sign_of(grown / (grown + 2.0), x)


def sigmoid(x: Real) -> Real:
    """1/(1 + exp(-x)): at most 2.5 ulp, down to the subnormal results."""
    small = exp(-abs(x))
    return where(x < 0.0, small, 1.0) / (small + 1.0)


def rsqrt(x: Real) -> Real:
    """1/sqrt(x): at most 1.5 ulp; infinite at zero with its sign, NaN below."""
    return 1.0 / sqrt(x)


def _normal(x: Real) -> tuple[Real, Truth]:
    """A positive `x`, multiplied by 2**lift where it is subnormal, and whether it was."""
    form = x.unit.form
    tiny = x < form.smallest_normal
    return where(tiny, x * 2.0**form.lift, x), tiny


def _split(x: Real) -> tuple[Real, Real]:
    """(k, m) with `x = 2**k * m` and sqrt(1/2) <= m < sqrt(2), for x positive and finite."""
    form = x.unit.form
    x, tiny = _normal(x)
    offset = form.pattern(_ROOT_HALF) - (form.bias << form.fraction)
    shifted = x.bits() - offset
    exponent = (shifted >> form.fraction) - form.bias
    mantissa = (x.bits() - (exponent << form.fraction)).as_real()
    return _real_of(exponent) - where(tiny, float(form.lift), 0.0), mantissa


def log(x: Real) -> Real:
    """The natural logarithm: at most 1 ulp; -inf at zero, NaN below."""
    table = _table(x)
    exponent, mantissa = _split(x)
    f = mantissa - 1.0
    s = f / (f + 2.0)
    square = s * s
    half_square = f * f * 0.5
    series = square * polynomial(square, table.log)
    correction = fma(s, half_square + series, exponent * table.ln2_low)
    result = fma(exponent, table.ln2_high, f - (half_square - correction))
    result = where(x.equals(0.0), -math.inf, result)
    result = where(x.equals(math.inf), math.inf, result)
    return where(x < 0.0, math.nan, where(x.is_nan(), x, result))


def cbrt(x: Real) -> Real:
    """The cube root, with the sign of `x`: at most 0.6 ulp."""
    form = x.unit.form
    size, tiny = _normal(abs(x))
    exponent = _real_of(size.bits() >> form.fraction) - float(form.bias)
    mantissa = ((size.bits() & ((1 << form.fraction) - 1)) | (form.bias << form.fraction)).as_real()
    third = floor((exponent + 0.5) * (1 / 3))
    remainder = exponent - third * 3.0
    one, two = remainder.equals(1.0), remainder.equals(2.0)
    value = mantissa * where(two, 4.0, where(one, 2.0, 1.0))
    # The reciprocal root of the mantissa from a cubic, then one step of third order, then Newton's for the root itself.
    start = polynomial(mantissa, (1.5418870254593866, -0.8099603422422362, 0.3177571361465763, -0.049936904136831425))
    start = start * where(two, 0.6299605249474366, where(one, 0.7937005259840998, 1.0))
    gap = fma(-(value * start * start), start, 1.0)
    inverse = fma(start * gap, fma(gap, 2 / 9, 1 / 3), start)
    inverse_square = inverse * inverse
    root = value * inverse_square
    square = root * root
    residue = fma(-square, root, value) - fma(root, root, -square) * root
    root = fma(residue * (1 / 3), inverse_square, root)
    root = root * where(tiny, 2.0 ** (-form.lift // 3), 1.0) * _power_of_two(_whole_of(third))
    return where((size.equals(0.0)) | ~(abs(x) < math.inf), x, with_sign_of(root, x))


def erf(x: Real) -> Real:
    """The error function: at most 1.5 ulp."""
    table = _table(x)
    size = abs(x)
    inner = fma(x, polynomial(x * x, table.erf), x)
    outer = _between(size, 1.0, table.erf_one)
    rest = exp(-(outer * outer)) * polynomial((outer - 2.0) / (outer + 2.0), table.erfc)
    return where(size < 1.0, inner, with_sign_of(1.0 - rest, x))


def _two_sum(a: Real, b: Real) -> tuple[Real, Real]:
    """(s, e) with `s` the rounded sum and `s + e` the exact one."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _fast_two_sum(a: Real, b: Real) -> tuple[Real, Real]:
    """As `_two_sum`, for |a| >= |b|."""
    total = a + b
    return total, b - (total - a)


def _log_in_two(x: Real) -> tuple[Real, Real]:
    """log(x) as an unevaluated sum high + low, to about 1.5 times the format's precision; x positive and finite."""
    table = _table(x)
    exponent, mantissa = _split(x)
    f = mantissa - 1.0
    d, d_low = _fast_two_sum(x.unit.real(1.0), mantissa)
    inverse = 1.0 / d
    s = f * inverse
    s_low = fma(-s, d_low, fma(-s, d, f)) * inverse
    square = s * s
    square_low = fma(s, s, -square) + (s + s) * s_low
    third, third_low = _fast_two_sum(x.unit.real(_TWO_THIRDS), square * polynomial(square, table.power))
    third_low = third_low + table.two_thirds_low
    cube = square * third
    cube_low = fma(square, third, -cube) + fma(square, third_low, square_low * third)
    series = s * cube
    series_low = fma(s, cube, -series) + fma(s, cube_low, s_low * cube)
    mantissa_log, error = _fast_two_sum(s + s, series)
    mantissa_low = error + fma(s_low, 2.0, series_low)
    high, error = _two_sum(exponent * table.ln2_high, mantissa_log)
    return _fast_two_sum(high, error + fma(exponent, table.ln2_low, mantissa_low))


def power(x: Real, y: Real) -> Real:
    """`x**y` as C99's pow: at most 1.2 ulp; NaN for a negative base and an exponent that is not an integer."""
    table = _table(x)
    size = abs(x)
    high, low = _log_in_two(size)
    product = y * high
    product_low = where(abs(product) < -table.exp_low, fma(y, high, -product) + y * low, 0.0)
    count, rest = _reduced(_between(product, table.exp_low, table.exp_high), product_low)
    result = _times_power_of_two(_exp_of_rest(rest), count)
    return _power_specials(x, y, size, result)


def _power_specials(x: Real, y: Real, size: Real, result: Real) -> Real:
    """The cases of Annex F.10.4.4 that the logarithm cannot express, on top of `size**y`."""
    extreme = size.equals(0.0) | size.equals(math.inf)
    result = where(extreme, where((y > 0.0) ^ size.equals(0.0), math.inf, 0.0), result)
    result = where(size.equals(1.0), 1.0, result)
    integral = rint(y).equals(y)
    odd = integral & ~rint(y * 0.5).equals(y * 0.5)
    negative = with_sign_of(x.unit.real(1.0), x) < 0.0
    result = where(negative & odd, -result, result)
    result = where((x < 0.0) & (size < math.inf) & ~integral, math.nan, result)
    result = where(x.is_nan() | y.is_nan(), x + y, result)
    return where(x.equals(1.0) | y.equals(0.0), 1.0, result)
