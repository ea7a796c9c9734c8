"""Elementary functions without branches, for loops in vectors: float32 and float64.

Every function takes any float (zero, subnormal, infinite, NaN), with the result of IEEE 754 and C99 Annex F. The
greatest error is stated in ulps of the result, and tests/backends/test_cpu_math.py measures it.
"""

from __future__ import annotations

import math

from ..common.constants import SINGLE, TABLES, Table
from .lanes import Real, Truth, Whole, fma, polynomial, rint, scales_in_one, sqrt, where, with_sign_of

_LOG2_E = 1.4426950408889634
_ROOT_HALF = 0.7071067811865476


def _table(x: Real) -> Table:
    return TABLES[x.unit.form]


def _real_of(count: Whole) -> Real:
    """A small integer (two's complement, far below 2**fraction) as a real, without a conversion instruction.

    Adding it to the bits of 1.5*2**fraction adds it to this number. AVX2 cannot convert 64-bit integers.
    """
    form = count.unit.form
    magic = 1.5 * 2.0**form.fraction
    return (count + form.pattern(magic)).as_real() - magic


def _power_of_two(count: Whole) -> Real:
    """2**count for a count between the exponents of the normal numbers."""
    form = count.unit.form
    return ((count + form.bias) << form.fraction).as_real()


def _times_power_of_two(x: Real, count: Whole) -> Real:
    """`x * 2**count` where the result may be subnormal or overflow; rounded once. |count| below twice the bias."""
    if scales_in_one():
        return x.unit.scaled(x, count)
    half = count.halved()
    return x * _power_of_two(half) * _power_of_two(count - half)


def _between(x: Real, low: float, high: float) -> Real:
    """`x` moved into [low, high]; NaN stays NaN."""
    x = where(x < low, low, x)
    return where(x > high, high, x)


def _reduced(x: Real) -> tuple[Whole, Real]:
    """(n, r) with `x = n*log(2) + r` and |r| hardly above log(2)/2, for an x without over- or underflow of exp."""
    form, table = x.unit.form, _table(x)
    magic = 1.5 * 2.0**form.fraction  # added to it, a small number is rounded to an integer, in the lowest bits
    shifted = fma(x, _LOG2_E, magic)
    count = shifted - magic
    rest = fma(count, -table.ln2_low, fma(count, -table.ln2_high, x))
    return shifted.bits() - form.pattern(magic), rest


def exp(x: Real) -> Real:
    """The exponential: at most 1.1 ulp."""
    table = _table(x)
    x = _between(x, table.exp_low, table.exp_high)
    count, rest = _reduced(x)
    return _times_power_of_two(_exp_of_rest(rest), count)


def _exp_of_rest(rest: Real) -> Real:
    """exp(rest) for |rest| <= log(2)/2."""
    return fma(rest * rest, polynomial(rest, _table(rest).exp), rest) + 1.0


def sign(x: Real) -> Real:
    """1, -1 or 0 by the sign of `x`; NaN for NaN."""
    size = abs(x)  # itself the answer for zeros and NaN
    return where(size > 0.0, with_sign_of(x.unit.real(1.0), x), size)


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


def inverse(x: Real) -> Real:
    """x**-1, correctly rounded."""
    return 1.0 / x


def inverse_square(x: Real) -> Real:
    """x**-2: at most 2.5 ulp. The inverse comes first: the square of a large or small `x` would leave the range."""
    once = 1.0 / x
    return once * once


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
    scale = _power_of_two(count)
    return fma(scale, small, scale - 1.0)


def expm1(x: Real) -> Real:
    """exp(x) - 1: at most 1.3 ulp in float32, 1.6 in float64; -1 at -inf."""
    table = _table(x)
    count, rest = _reduced(_between(x, -50.0, table.exp_high))
    small = fma(rest * rest, polynomial(rest, table.exp), rest)
    # Half of it, for 2**count alone may be beyond the largest number.
    half = _power_of_two(count - 1)
    grown = fma(half, small, half - 0.5)
    return where(abs(x) < 2.0 ** -(x.unit.form.fraction + 2), x, grown + grown)


def tanh(x: Real) -> Real:
    """The hyperbolic tangent: at most 3 ulp."""
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


def hypot(a: Real, b: Real) -> Real:
    """sqrt(a*a + b*b): at most 2 ulp, without overflow and underflow; infinite where either is, even beside NaN."""
    a, b = abs(a), abs(b)
    small, large = minimum(a, b), maximum(a, b)
    ratio = where(large > 0.0, small / large, 0.0)
    result = large * sqrt(fma(ratio, ratio, 1.0))
    return where(a.equals(math.inf) | b.equals(math.inf), math.inf, result)


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
    exponent, mantissa = _split(x)
    f = mantissa - 1.0
    result = _log_of_parts(exponent, f, exponent * _table(x).ln2_low)
    result = where(x.equals(0.0), -math.inf, result)
    result = where(x.equals(math.inf), math.inf, result)
    return where(x < 0.0, math.nan, where(x.is_nan(), x, result))


def _log_of_parts(exponent: Real, f: Real, low: Real) -> Real:
    """exponent*log(2) + log(1 + f) with sqrt(1/2) <= 1 + f < sqrt(2); `low` is exponent*ln2_low, and more."""
    table = _table(f)
    s = f / (f + 2.0)
    square = s * s
    half_square = f * f * 0.5
    series = square * polynomial(square, table.log)
    correction = fma(s, half_square + series, low)
    return fma(exponent, table.ln2_high, f - (half_square - correction))


def log1p(x: Real) -> Real:
    """log(1 + x): at most 1 ulp; -inf at -1, NaN below."""
    # Between sqrt(1/2) - 1 and sqrt(2) - 1 the logarithm is that of 1 + x itself; elsewhere of 1 + x, rounded, and the
    # part lost over it is the logarithm's rest.
    near = (x > _ROOT_HALF - 1.0) & (x < 2.0 * _ROOT_HALF - 1.0)
    total = x + 1.0
    lost = where(abs(x) < 1.0, x - (total - 1.0), 1.0 - (total - x))
    exponent, mantissa = _split(total)
    exponent = where(near, 0.0, exponent)
    rest = exponent * _table(x).ln2_low + where(near, 0.0, lost / total)
    result = _log_of_parts(exponent, where(near, x, mantissa - 1.0), rest)
    result = where(x.equals(-1.0), -math.inf, result)
    result = where(x.equals(math.inf) | x.equals(0.0), x, result)
    return where(x < -1.0, math.nan, where(x.is_nan(), x, result))


def cbrt(x: Real) -> Real:
    """The cube root, with the sign of `x`: at most 0.9 ulp."""
    form = x.unit.form
    size = abs(x)
    # Far above the subnormal numbers, so that the residue below is not one.
    tiny = size < form.smallest_normal * 2.0**form.lift
    value = where(tiny, size * 2.0**form.lift, size)
    inverse = _inverse_cbrt(value)
    inverse_square = inverse * inverse
    root = value * inverse_square
    residue = fma(-(root * root), root, value)
    root = fma(residue, inverse_square * (1 / 3), root)
    root = where(tiny, root * 2.0 ** (-form.lift // 3), root)
    return where(size.equals(0.0) | ~(size < math.inf), x, with_sign_of(root, x))


def _inverse_cbrt(x: Real) -> Real:
    """x**(-1/3) for a normal positive `x`, to half the format's precision.

    The bits of a number are nearly its logarithm: minus a third of them gives a guess within 4 per cent, so that
    e = 1 - x*guess**3 is small and guess*(1 - e)**(-1/3) a polynomial away.
    """
    form = x.unit.form
    magic = 2.0**form.fraction
    shift = form.bits - form.fraction  # leaves room to compute with the upper bits as a real
    upper = ((x.bits() >> shift) | form.pattern(magic)).as_real() - magic
    logarithm = 2.0 ** (form.fraction - shift)  # the step of `upper` from one power of two to the next
    start = fma(upper, -1 / 3, (form.bias * 4 / 3 - 0.068023885) * logarithm)
    guess = ((start + magic).bits() << shift).as_real()
    gap = fma(-(x * guess), guess * guess, 1.0)
    return fma(guess * gap, polynomial(gap, _table(x).cbrt), guess)


def erf(x: Real) -> Real:
    """The error function: at most 1.5 ulp."""
    table = _table(x)
    size = abs(x)
    inner = fma(x, polynomial(x * x, table.erf), x)
    logarithm = polynomial(_between(size, 1.0, table.erf_one), table.log_erfc)
    count, rest = _reduced(logarithm)
    outer = 1.0 - _exp_of_rest(rest) * _power_of_two(count)
    return where(size < 1.0, inner, with_sign_of(outer, x))


def power(x: Real, y: Real) -> Real:
    """`x**y` as C99's pow: at most 2.5 ulp in float32, 1.2 in float64.

    NaN for a negative base and an exponent that is not an integer.
    """
    table = _table(x)
    size = abs(x)
    high, low = _log_in_two(size)
    high = where(size < math.inf, where(size.equals(0.0), -math.inf, high), size)
    # The largest finite exponent in place of an infinite one has the same results, and avoids 0*inf in 1**inf.
    finite = _between(y, -x.unit.form.largest, x.unit.form.largest)
    product = finite * high
    # Where `product` is beyond the range its low part means nothing, and may be infinite or NaN.
    product_low = fma(finite, high, -product) + finite * low
    product_low = where(product_low > -1e-3, where(product_low < 1e-3, product_low, 1e-3), -1e-3)
    count, rest = _reduced(_between(product, table.exp_low, table.exp_high))
    result = _times_power_of_two(_exp_of_rest(rest + product_low), count)
    result = _with_sign_of_power(x, y, result)
    return where(x.equals(1.0) | y.equals(0.0), 1.0, result)


def _with_sign_of_power(x: Real, y: Real, result: Real) -> Real:
    """x**y from |x|**y: negative for an odd exponent; NaN for a finite negative base and an exponent of no integer."""
    form = x.unit.form
    integral = rint(y).equals(y)
    odd = integral & ~rint(y * 0.5).equals(y * 0.5)
    sign = where(odd, -0.0, 0.0).bits() & x.bits()
    result = (result.bits() | sign).as_real()
    return where((x < 0.0) & (x >= -form.largest) & ~integral, math.nan, result)


def _log_in_two(x: Real) -> tuple[Real, Real]:
    """log(x) as an unevaluated sum high + low; x positive and finite.

    Its relative error is 2**-64 in float64 and 2**-30 in float32. A power turns it into an absolute error, multiplied
    by the logarithm of the result: at most 745 and 104.
    """
    table = _table(x)
    exponent, mantissa = _split(x)
    f = mantissa - 1.0
    inverse = 1.0 / (f + 2.0)
    q = (f + f) * inverse
    # f - q is exact, for they differ by less than a factor of two.
    q_low = fma(-q, f, (f - q) * 2.0) * inverse
    if x.unit.form is SINGLE:
        series = q * q * polynomial(q * q, table.power)
        total = fma(q, series, q)
        low = fma(q, series, q - total) + fma(series * 3.0, q_low, q_low)
    else:
        total, low = _series_in_two(q, q_low, table)
    # Where the exponent is not zero, its part is the larger.
    high, error = _fast_two_sum(exponent * table.ln2_high, total)
    return high, error + fma(exponent, table.ln2_low, low)


def _series_in_two(q: Real, q_low: Real, table: Table) -> tuple[Real, Real]:
    """q + q**3*T(q**2), the logarithm of (2 + q)/(2 - q), with the leading term 1/12 of T in twice the precision."""
    square = q * q
    square_low = fma(q, q, -square) + (q + q) * q_low
    twelfth, twelfth_low = _fast_two_sum(q.unit.real(1 / 12), square * polynomial(square, table.power))
    twelfth_low = twelfth_low + 4.625929269271485e-18  # 1/12 less the float64 nearest to it
    cube = square * twelfth
    cube_low = fma(square, twelfth, -cube) + fma(square, twelfth_low, square_low * twelfth)
    series = q * cube
    series_low = fma(q, cube, -series) + fma(q, cube_low, q_low * cube)
    total, error = _fast_two_sum(q, series)
    return total, error + (q_low + series_low)


def _fast_two_sum(a: Real, b: Real) -> tuple[Real, Real]:
    """(s, e) with `s` the rounded sum and `s + e` the exact one, for |a| >= |b| or a = 0."""
    total = a + b
    return total, b - (total - a)
