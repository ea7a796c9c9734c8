"""Functions that Triton lacks or computes with less than IEEE's care, as Triton source for float32 and float64.

Triton's `exp` in float32 is off by as many as 40 ulp, its other functions in float32 take subnormal numbers for zero on
NVIDIA's GPUs, and what it calls libdevice does not run in its interpreter. Its float64 functions have none of these
faults, so everything here goes through them: exact to an ulp or two in both formats, the same on every machine, and
slow on GPUs that are slow in float64. No formula depends on a fused multiply-add, which the interpreter rounds twice;
kernels are compiled without contraction, which would spoil the products of two words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_TO_BFLOAT16 = '''\
@triton.jit
def to_bfloat16(x, EMULATED: tl.constexpr):
    """A float32 rounded to bfloat16, halves to even; by hand in the interpreter, whose own rounding loses carries."""
    if EMULATED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        narrow = tl.where(x == x, rounded, (bits >> 16) | 0x40)
        return narrow.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)
'''

_LOWEST = '''\
@triton.jit
def lowest(x, axis: tl.constexpr = None, keep_dims: tl.constexpr = False):
    """The minimum, NaN where there is one."""
    least = tl.min(tl.where(x == x, x, float("inf")), axis, keep_dims=keep_dims)
    return tl.where(tl.max((x != x).to(tl.int32), axis, keep_dims=keep_dims) != 0, float("nan"), least)
'''

_HIGHEST = '''\
@triton.jit
def highest(x, axis: tl.constexpr = None, keep_dims: tl.constexpr = False):
    """The maximum, NaN where there is one."""
    most = tl.max(tl.where(x == x, x, -float("inf")), axis, keep_dims=keep_dims)
    return tl.where(tl.max((x != x).to(tl.int32), axis, keep_dims=keep_dims) != 0, float("nan"), most)
'''

_FINISH = '''\
@triton.jit(do_not_specialize=["jobs", "slots", "results"])
def finish(jobs, slots, results, LANES: tl.constexpr):
    """Joins slots in a fixed order, round by round: to LANES results side by side, or to one.

    A line of `jobs` says what the reduction is (0 sum, 1 minimum, 2 maximum), whether to one result, where the first
    slot and the result are, how many rounds there are and how far apart, and how many slots there are to one result, or
    results side by side.
    """
    job = jobs + 7 * tl.program_id(0).to(tl.int64)
    kind, one, at, to = tl.load(job), tl.load(job + 1), tl.load(job + 2), tl.load(job + 3)
    rounds, apart, limit = tl.load(job + 4), tl.load(job + 5), tl.load(job + 6)
    lane = tl.arange(0, LANES)
    nothing = tl.where(kind == 0, 0.0, tl.where(kind == 1, float("inf"), -float("inf"))).to(tl.float64)
    total = tl.full((LANES,), 0.0, tl.float64) + nothing
    for done in range(0, rounds):
        inside = done * one * LANES + lane < limit
        x = tl.where(inside, tl.load(slots + at + done * apart + lane, mask=inside), nothing)
        least = tl.minimum(total, x, propagate_nan=tl.PropagateNan.ALL)
        most = tl.maximum(total, x, propagate_nan=tl.PropagateNan.ALL)
        total = tl.where(kind == 0, total + x, tl.where(kind == 1, least, most))
    if one == 0:
        tl.store(results + to + lane, total, mask=lane < limit)
    elif kind == 0:
        tl.store(results + to, tl.sum(total))
    elif kind == 1:
        tl.store(results + to, lowest(total))
    else:
        tl.store(results + to, highest(total))
'''

_SIGN = '''\
@triton.jit
def sign(x):
    """1, -1 or 0 by the sign of `x`; NaN of NaN."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))
'''

_EXP = '''\
@triton.jit
def exp(x):
    """The exponential."""
    return tl.exp(x.to(tl.float64)).to(x.dtype)
'''

_LOG = '''\
@triton.jit
def log(x):
    """The natural logarithm; -inf at zero, NaN below."""
    return tl.log(x.to(tl.float64)).to(x.dtype)
'''

_ERF = '''\
@triton.jit
def erf(x):
    """The error function."""
    return tl.erf(x.to(tl.float64)).to(x.dtype)
'''

_SIGMOID = '''\
@triton.jit
def sigmoid(x):
    """1/(1 + exp(-x)) without overflow: exp only sees what is not positive."""
    small = tl.exp(-tl.abs(x.to(tl.float64)))
    return (tl.where(x < 0, small, 1.0) / (small + 1.0)).to(x.dtype)
'''

_TANH = '''\
@triton.jit
def tanh(x):
    """The hyperbolic tangent, from exp(2*abs(x)) - 1 by Kahan's formula, which is exact for small numbers too."""
    size = tl.abs(x.to(tl.float64))
    double = tl.where(size > 20, 40.0, size + size)
    power = tl.exp(double)
    grown = tl.where(power == 1, double, (power - 1) * double / tl.log(power))
    result = (grown / (grown + 2)).to(x.dtype)
    return tl.where(x < 0, -result, tl.where(x == 0, x, result))
'''

_CBRT = '''\
@triton.jit
def cbrt(x):
    """The cube root, with the sign of `x`: an approximation and one step of Newton's, away from subnormal numbers."""
    size = tl.abs(x.to(tl.float64))
    tiny = size < 1e-270
    value = tl.where(tiny, size * 2.037035976334486e90, size)
    root = tl.exp(tl.log(value) / 3)
    root = root - (root - value / (root * root)) / 3
    root = tl.where(tiny, root * 7.888609052210118e-31, root).to(x.dtype)
    return tl.where((x == 0) | (tl.abs(x) == float("inf")) | (x != x), x, tl.where(x < 0, -root, root))
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

_POWER_32 = '''\
@triton.jit
def power(x, y):
    """x**y as C99's pow, for float32."""
    wide, exponent = x.to(tl.float64), y.to(tl.float64)
    result = tl.exp(exponent * tl.log(tl.abs(wide)))
    return power_of_any(wide, exponent, result).to(tl.float32)
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


def _series() -> str:
    """The coefficients of 2*atanh(s)/s**3 from s**2 on, by Horner's scheme: the rest is below 2**-66."""
    text = repr(2 / 27)
    for odd in range(25, 3, -2):
        text = f"({2 / odd!r} + square * {text})"
    return text


_COMMON: Mapping[str, str] = {
    "lowest": _LOWEST, "highest": _HIGHEST, "finish": _FINISH,
    "to_bfloat16": _TO_BFLOAT16, "sign": _SIGN, "exp": _EXP, "log": _LOG, "erf": _ERF, "sigmoid": _SIGMOID,
    "tanh": _TANH, "cbrt": _CBRT, "remainder": _REMAINDER, "power_of_any": _POWER_OF_ANY,
}  # fmt: skip

#: The text of each function by name, those it calls before it.
WORDS: Mapping[str, str] = {
    **_COMMON, "power": _POWER_32, "exact_product": _EXACT_PRODUCT,
    "log_in_two": _LOG_IN_TWO.replace("<series>", _series()), "power_64": _POWER_64,
}  # fmt: skip


def words_used(text: str) -> list[str]:
    """The source of every function that `text` calls, and that those call, in an order that defines before use."""
    found: list[str] = []
    for name, source in reversed(list(WORDS.items())):
        if any(re.search(rf"(?<![\w.]){name}\(", re.sub(r'""".*?"""', "", used)) for used in (text, *found)):
            found.insert(0, source)
    return found
