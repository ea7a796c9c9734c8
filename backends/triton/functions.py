"""Elementary functions as Triton source, in float32 and float64.

In float32, Triton's `exp` has errors up to 40 ulp, and its other functions take subnormal numbers for zero on NVIDIA's
GPUs. Functions of libdevice do not run in its interpreter. So the functions of float32 here are formulas of + - * / and
bits, with errors up to three ulp, at the speed of float32 everywhere. Only powers and remainders use float64; this is
slow on some GPUs. The functions of float64 use Triton's `exp`, `log` and `erf`, without such faults in float64. No
formula depends on a fused multiply-add, as the interpreter rounds it twice. Kernels are compiled without contraction:
it would spoil the products of two words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..common.constants import SINGLE, TABLES
from ..common.text import polynomial

_POWER_OF_TWO = '''\
@triton.jit
def power_of_two(n):
    """2**n as a float32, for n from -126 to 127."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)
'''

_EXP = '''\
@triton.jit
def exp(x):
    """The exponential of a float32: n*log(2) is taken away, and 2**n is multiplied in again."""
    x = tl.where(x < -104.0, -104.0, tl.where(x > 89.0, 89.0, x))
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    rest = (x - n * <ln2_high>) - n * <ln2_low>
    grown = rest + rest * rest * <exp rest>
    n = n.to(tl.int32)
    half = n >> 1
    return (grown + 1.0) * power_of_two(half) * power_of_two(n - half)
'''

_EXPM1 = '''\
@triton.jit
def expm1(x):
    """exp(x) - 1 of a float32, by half of it: 2**n alone may be beyond the largest number."""
    inside = tl.where(x < -50.0, -50.0, tl.where(x > 89.0, 89.0, x))
    n = tl.floor(inside * 1.4426950408889634 + 0.5)
    rest = (inside - n * <ln2_high>) - n * <ln2_low>
    half = power_of_two(n.to(tl.int32) - 1)
    grown = (rest + rest * rest * <exp rest>) * half + (half - 0.5)
    return tl.where(tl.abs(x) < 2.9802322387695312e-08, x, grown + grown)
'''

_EXPM1_64 = '''\
@triton.jit
def expm1_64(x):
    """exp(x) - 1 of a float64 by Kahan's formula."""
    power = tl.exp(x)
    grown = (power - 1) * x / tl.log(power)
    grown = tl.where(x > 40, power, tl.where(x < -40, -1.0, grown))
    return tl.where(power == 1, x, grown)
'''

_LOG = '''\
@triton.jit
def log(x):
    """The natural logarithm of a float32, from that of its fraction between sqrt(1/2) and sqrt(2)."""
    tiny = x < 1.1754943508222875e-38
    bits = tl.where(tiny, x * 16777216.0, x).to(tl.int32, bitcast=True)
    shift = (bits - 1060439283) >> 23
    k = shift.to(tl.float32) - tl.where(tiny, 24.0, 0.0)
    f = (bits - (shift << 23)).to(tl.float32, bitcast=True) - 1.0
    s = tl.div_rn(f, f + 2.0)
    square = s * s
    half = f * f * 0.5
    correction = s * (half + square * <log square>) + k * <ln2_low>
    result = k * <ln2_high> + (f - (half - correction))
    result = tl.where(x == 0, float("-inf"), tl.where(x == float("inf"), x, result))
    return tl.where(x < 0, float("nan"), tl.where(x == x, result, x))
'''

_LOG1P = '''\
@triton.jit
def log1p(x):
    """log(1 + x) of a float32: near zero the logarithm's series of x itself, elsewhere what 1 + x lost is added."""
    near = (x > -0.29289323) & (x < 0.41421354)
    total = x + 1.0
    lost = tl.where(tl.abs(x) < 1, x - (total - 1.0), 1.0 - (total - x))
    bits = total.to(tl.int32, bitcast=True)
    shift = (bits - 1060439283) >> 23
    k = tl.where(near, 0.0, shift.to(tl.float32))
    f = tl.where(near, x, (bits - (shift << 23)).to(tl.float32, bitcast=True) - 1.0)
    rest = k * <ln2_low> + tl.where(near, 0.0, tl.div_rn(lost, total))
    s = tl.div_rn(f, f + 2.0)
    square = s * s
    half = f * f * 0.5
    result = k * <ln2_high> + (f - (half - (s * (half + square * <log square>) + rest)))
    result = tl.where(x == -1, float("-inf"), tl.where((x == 0) | (x == float("inf")), x, result))
    return tl.where(x < -1, float("nan"), tl.where(x == x, result, x))
'''

_LOG1P_64 = '''\
@triton.jit
def log1p_64(x):
    """log(1 + x) of a float64: the logarithm of 1 + x, rounded, and what was lost, over it."""
    total = x + 1.0
    lost = tl.where(tl.abs(x) < 1, x - (total - 1.0), 1.0 - (total - x))
    result = tl.log(total) + lost / total
    result = tl.where((total == 0) | (total == float("inf")), tl.log(total), result)
    return tl.where(total == 1, x, result)
'''

_HYPOT = '''\
@triton.jit
def hypot(a, b):
    """sqrt(a*a + b*b) of float32 numbers, without overflow and underflow."""
    a, b = tl.broadcast(tl.abs(a), tl.abs(b))
    large, small = tl.where(a > b, a, b), tl.where(a > b, b, a)
    ratio = tl.where(large > 0, tl.div_rn(small, large), 0.0)
    result = large * tl.sqrt_rn(ratio * ratio + 1.0)
    result = tl.where((a == a) & (b == b), result, a + b)
    return tl.where((a == float("inf")) | (b == float("inf")), float("inf"), result)
'''

_ERF = '''\
@triton.jit
def erf(x):
    """The error function of a float32: a polynomial near zero, then one for the logarithm of what is left to 1."""
    size = tl.abs(x)
    square = x * x
    inner = x + x * <erf square>
    far = tl.where(size < 1.0, 1.0, tl.where(size > 4.0, 4.0, size))
    outer = 1.0 - exp(<log_erfc far>)
    return tl.where(size < 1.0, inner, tl.where(x < 0, -outer, outer))
'''

_SIGMOID = '''\
@triton.jit
def sigmoid(x):
    """1/(1 + exp(-x)) of a float32, without overflow: exp only sees what is not positive."""
    small = exp(-tl.abs(x))
    return tl.div_rn(tl.where(x < 0, small, 1.0), small + 1.0)
'''

_TANH = '''\
@triton.jit
def tanh(x):
    """The hyperbolic tangent of a float32, from exp(2*abs(x)) - 1, which is as exact for small numbers."""
    size = tl.abs(x)
    double = tl.where(size > 9.5, 19.0, size + size)
    n = tl.floor(double * 1.4426950408889634 + 0.5)
    rest = (double - n * <ln2_high>) - n * <ln2_low>
    scale = power_of_two(n.to(tl.int32))
    grown = (rest + rest * rest * <exp rest>) * scale + (scale - 1.0)
    result = tl.div_rn(grown, grown + 2.0)
    return tl.where(x < 0, -result, tl.where(x == 0, x, result))
'''

_FLOOR = '''\
@triton.jit
def floor(x):
    """The largest whole number not above a float32: Triton's own takes subnormal numbers for zero on NVIDIA's GPUs."""
    return tl.where((x < 0) & (x > -1.0), -1.0, tl.floor(x))
'''

_CBRT = '''\
@triton.jit
def cbrt(x):
    """The cube root of a float32: its bits give a guess of the inverse one, a polynomial and Newton's step the rest."""
    size = tl.abs(x)
    tiny = size < 1.9721522630525295e-31
    value = tl.where(tiny, size * 16777216.0, size)
    guess = (<cbrt start> - value.to(tl.int32, bitcast=True) // 3).to(tl.float32, bitcast=True)
    gap = 1.0 - value * guess * (guess * guess)
    inverse = guess + guess * gap * <cbrt gap>
    square = inverse * inverse
    root = value * square
    root = root + (value - root * root * root) * (square * 0.3333333333333333)
    root = tl.where(tiny, root * 0.00390625, root)
    return tl.where((size > 0) & (size < float("inf")), tl.where(x < 0, -root, root), x)
'''

_POWER_32 = '''\
@triton.jit
def power(x, y):
    """x**y as C99's pow, for float32."""
    wide, exponent = x.to(tl.float64), y.to(tl.float64)
    result = tl.exp(exponent * tl.log(tl.abs(wide)))
    return power_of_any(wide, exponent, result).to(tl.float32)
'''

_REMAINDER = '''\
@triton.jit
def remainder(a, b):
    """a - b*floor(a/b) without rounding, with the sign of `b`: a long division by 25 bits of the quotient at a time.

    NaN where b is zero, a is infinite, or a/b is beyond the range of float64.
    """
    x, y = a.to(tl.float64), tl.abs(b.to(tl.float64))
    defined = (tl.abs(x) < float("inf")) & (y > 0) & (tl.abs(x) / y < float("inf"))
    divisor = tl.where(defined & (y < float("inf")), y, 1.0)
    rest = tl.where(defined & (y < float("inf")), x, 0.0)
    high = (divisor.to(tl.int64, bitcast=True) & -134217728).to(tl.float64, bitcast=True)
    while tl.max((tl.abs(rest) >= divisor).to(tl.int32)) > 0:
        quotient = tl.abs(rest) / divisor
        quotient = (quotient.to(tl.int64, bitcast=True) & -268435456).to(tl.float64, bitcast=True)
        quotient = tl.where(rest < 0, -tl.floor(quotient), tl.floor(quotient))
        rest = (rest - quotient * high) - quotient * (divisor - high)
    rest = tl.where(y < float("inf"), rest, x)
    other_side = (rest != 0) & ((rest < 0) != (b < 0))
    rest = tl.where(other_side, rest + b.to(tl.float64), rest)
    return tl.where(defined, rest, float("nan")).to(a.dtype)
'''

_POWER_OF_ANY = '''\
@triton.jit
def power_of_any(x, y, result):
    """x**y for any numbers, in float64, from abs(x)**y: the cases of C99's Annex F."""
    x, y = tl.broadcast(x, y)
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(y * 0.5) * 2 != y)
    negative = x.to(tl.int64, bitcast=True) < 0
    result = tl.where(tl.abs(x) == 1, 1.0, result)
    result = tl.where(negative & odd, -result, result)
    result = tl.where((x < 0) & (x > float("-inf")) & (whole == 0), float("nan"), result)
    result = tl.where((x != x) | (y != y), x + y, result)
    return tl.where((x == 1) | (y == 0), 1.0, result)
'''

_SIGMOID_64 = '''\
@triton.jit
def sigmoid_64(x):
    """1/(1 + exp(-x)) of a float64, without overflow: exp only sees what is not positive."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (small + 1.0)
'''

_TANH_64 = '''\
@triton.jit
def tanh_64(x):
    """The hyperbolic tangent of a float64, from exp(2*abs(x)) - 1 by Kahan's formula, exact for small numbers too."""
    size = tl.abs(x)
    double = tl.where(size > 20, 40.0, size + size)
    power = tl.exp(double)
    grown = tl.where(power == 1, double, (power - 1) * double / tl.log(power))
    result = grown / (grown + 2)
    return tl.where(x < 0, -result, tl.where(x == 0, x, result))
'''

_CBRT_64 = '''\
@triton.jit
def cbrt_64(x):
    """The cube root of a float64: an approximation and one step of Newton's, away from subnormal numbers."""
    size = tl.abs(x)
    tiny = size < 1e-270
    value = tl.where(tiny, size * 2.037035976334486e90, size)
    root = tl.exp(tl.log(value) / 3)
    root = root - (root - value / (root * root)) / 3
    root = tl.where(tiny, root * 7.888609052210118e-31, root)
    return tl.where((x == 0) | (tl.abs(x) == float("inf")) | (x != x), x, tl.where(x < 0, -root, root))
'''

_EXACT_PRODUCT = '''\
@triton.jit
def exact_product(a, b):
    """(p, e) with `p` the rounded product and `p + e` the exact one: Dekker's, of factors cut in two by their bits."""
    a_high = (a.to(tl.int64, bitcast=True) & -134217728).to(tl.float64, bitcast=True)
    b_high = (b.to(tl.int64, bitcast=True) & -134217728).to(tl.float64, bitcast=True)
    a_low, b_low = a - a_high, b - b_high
    product = a * b
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
'''

_LOG_IN_TWO = '''\
@triton.jit
def log_in_two(x):
    """log(x) of a positive float64 as an unevaluated sum: k*log(2) + 2*atanh(s), its first terms in two words."""
    tiny = x < 2.2250738585072014e-308
    value = tl.where(tiny, x * 18014398509481984.0, x)
    bits = value.to(tl.int64, bitcast=True)
    shift = (bits - 4604544271217802189) >> 52
    k = shift.to(tl.float64) - tl.where(tiny, 54.0, 0.0)
    m = (bits - (shift << 52)).to(tl.float64, bitcast=True)
    f = m - 1.0
    d = m + 1.0
    d_low = m - (d - 1.0)
    s = f / d
    p, e = exact_product(s, d)
    s_low = (((f - p) - e) - s * d_low) / d
    square, e = exact_product(s, s)
    square_low = e + 2.0 * s * s_low
    terms = square * <series>
    third = terms + 0.6666666666666666
    third_low = (terms - (third - 0.6666666666666666)) + 3.700743415417188e-17
    cube, e = exact_product(square, third)
    cube_low = e + square * third_low + square_low * third
    rest, e = exact_product(s, cube)
    rest_low = e + s * cube_low + s_low * cube
    total = 2.0 * s + rest
    total_low = (rest - (total - 2.0 * s)) + (2.0 * s_low + rest_low)
    large = k * 0.6931471803691238
    near = large + total
    low = (total - (near - large)) + (k * 1.9082149292705877e-10 + total_low)
    high = near + low
    return high, low - (high - near)
'''

_POWER_64 = '''\
@triton.jit
def power_64(x, y):
    """x**y as C99's pow, for float64."""
    size = tl.abs(x)
    ordinary = (size > 0) & (size < float("inf"))
    high, low = log_in_two(tl.where(ordinary, size, 1.0))
    high = tl.where(ordinary, high, tl.where(size == 0, float("-inf"), size))
    product, rest = exact_product(y, high)
    rest = tl.where(tl.abs(product) < 1000, rest + y * low, 0.0)
    result = tl.exp(product)
    result = tl.where(result < float("inf"), result + result * rest, result)
    return power_of_any(x, y, result)
'''


#: In float64, Triton's own quotient and root are IEEE's.
_HYPOT_64 = (
    _HYPOT.replace("hypot(", "hypot_64(").replace("float32", "float64")
    .replace("tl.div_rn(small, large)", "small / large").replace("tl.sqrt_rn", "tl.sqrt")
)  # fmt: skip


def _series() -> str:
    """The coefficients of 2*atanh(s)/s**3 from s**2 on, by Horner's scheme: the rest is below 2**-66."""
    return polynomial("square", [repr(2 / odd) for odd in range(5, 28, 2)])


def _filled(source: str) -> str:
    """A source with its constants: numbers of the tables, and polynomials of a variable."""
    table = TABLES[SINGLE]
    start = round((SINGLE.bias * 4 / 3 - 0.068023885) * 2**SINGLE.fraction)
    numbers = {"ln2_high": repr(table.ln2_high), "ln2_low": repr(table.ln2_low), "cbrt start": str(start)}

    def replaced(mark: re.Match[str]) -> str:
        kind, _, name = mark[1].partition(" ")
        return numbers.get(mark[1]) or polynomial(name, [*map(repr, getattr(table, kind))])

    return re.sub(r"<(\w+(?: \w+)?)>", replaced, source)


#: The text of each function by name, after the functions it calls. A name ends with 64 for float64 beside float32.
FUNCTIONS: Mapping[str, str] = {
    name: _filled(source)
    for name, source in {
        "power_of_two": _POWER_OF_TWO, "exp": _EXP, "expm1": _EXPM1, "expm1_64": _EXPM1_64, "log": _LOG,
        "log1p": _LOG1P, "log1p_64": _LOG1P_64, "hypot": _HYPOT, "hypot_64": _HYPOT_64, "erf": _ERF,
        "sigmoid": _SIGMOID, "tanh": _TANH, "floor": _FLOOR, "cbrt": _CBRT, "sigmoid_64": _SIGMOID_64,
        "tanh_64": _TANH_64, "cbrt_64": _CBRT_64, "remainder": _REMAINDER, "power_of_any": _POWER_OF_ANY,
        "power": _POWER_32, "exact_product": _EXACT_PRODUCT,
        "log_in_two": _LOG_IN_TWO.replace("<series>", _series()), "power_64": _POWER_64,
    }.items()
}  # fmt: skip
