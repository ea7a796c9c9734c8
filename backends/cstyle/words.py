"""Functions that C's library lacks, as text for C99 and CUDA C alike, for float and double.

All other functions in a printed source are of C99's math.h, in `LIBRARY`, with an `f` behind the name for float. Their
greatest errors, in ulps: of glibc's on x86-64 as tests/backends/test_c_words.py measures them, over numbers of every
size; of CUDA's as its programming guide says.

              glibc              CUDA, without fast-math options
              float    double    float    double
    exp       1        1         1        1
    expm1     1        1         1        1
    log       1        1         1        1
    log1p     1        1         1        1
    hypot     1        1         3        2
    pow       1        1         4        2
    cbrt      1        4         1        1
    erf       1        1         2        2
    tanh      2.2      2.2       2        2
    sin, cos  1        1         2        2

The others are exact or correctly rounded in both. No formula here depends on a fused multiply-add: sources are
compiled without contraction, and C and CUDA C give the same bits for + - * / and the square root.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..common.constants import DOUBLE, SINGLE
from ..common.quotients import LEAST_DIVISOR, MOST_DIVISOR, bounds
from ..common.text import filled, used
from .dialect import Dialect
from .noise_words import NOISE_WORDS, typed

#: Templates: `REAL` is the type, and a name followed by `F` has the type's suffix.
_TYPED: Mapping[str, str] = {
    "sign": """\
/* 1, -1 or 0 by the sign of x; NaN of NaN. */
FUNCTION REAL signF(REAL x)
{
    return x > 0 ? ONE : x < 0 ? -ONE : fabsF(x);
}
""",
    "minimum": """\
/* The smaller; NaN where either is. */
FUNCTION REAL minimumF(REAL a, REAL b)
{
    const REAL less = a < b ? a : b;
    return a != a ? a : less;
}
""",
    "maximum": """\
/* The larger; NaN where either is. */
FUNCTION REAL maximumF(REAL a, REAL b)
{
    const REAL more = a > b ? a : b;
    return a != a ? a : more;
}
""",
    "sigmoid": """\
/* 1/(1 + exp(-x)) without overflow: exp only sees what is not positive. */
FUNCTION REAL sigmoidF(REAL x)
{
    const REAL small = expF(-fabsF(x));
    return (x < 0 ? small : ONE) / (small + ONE);
}
""",
    "modulo": """\
/* a - b*floor(a/b) without rounding, with the sign of b. */
FUNCTION REAL moduloF(REAL a, REAL b)
{
    const REAL rest = fmodF(a, b);
    if (rest == 0)
        return copysignF(rest, b);
    return (rest < 0) != (b < 0) ? rest + b : rest;
}
""",
    "inverse_square": """\
/* x**-2; the inverse comes first, for the square of a large or small x would leave the range. */
FUNCTION REAL inverse_squareF(REAL x)
{
    const REAL once = ONE / x;
    return once * once;
}
""",
    "root": """\
/* x**0.5 as C's pow has it: unlike the square root, +0 at -0 and infinite at -infinity. */
FUNCTION REAL rootF(REAL x)
{
    return x == -INFINITY ? INFINITY : sqrtF(x) + 0;
}
""",
}

#: Quotients by a number that divides many elements: see `common.quotients`. Marks stand for the bounds of a type.
_QUOTIENTS: Mapping[str, str] = {
    "reciprocal": """\
/* 1/divisor where quotients by it are products; else NaN, and they are divisions. */
FUNCTION REAL reciprocalF(REAL divisor)
{
    return divisor >= <least divisor> && divisor <= <most divisor> ? ONE / divisor : NAN;
}
""",
    "quotient": """\
/* x/divisor as IEEE rounds it, with the inverse of the divisor from reciprocal. */
FUNCTION REAL quotientF(REAL x, REAL divisor, REAL inverse)
{
    const REAL near = x * inverse;
    const REAL size = fabsF(near);
    if (size >= <least> && size < <most>)
        return fmaF(-fmaF(near, divisor, -x), inverse, near);
    return x / divisor;
}
""",
}


def _bounded(template: str, suffix: str) -> str:
    form = SINGLE if suffix else DOUBLE
    numbers = (LEAST_DIVISOR[form], MOST_DIVISOR[form], *bounds(form))
    names = ("least divisor", "most divisor", "least", "most")
    marks = {f"<{name}>": f"{number!r}{suffix}" for name, number in zip(names, numbers, strict=True)}
    return typed(filled(template, marks), suffix)


_PLAIN: Mapping[str, str] = {
    "float_of": """\
/* The float that has these bits. */
FUNCTION float float_of(uint32_t bits)
{
    const union { uint32_t bits; float value; } both = {bits};
    return both.value;
}
""",
    "bits_of": """\
/* The bits of a float. */
FUNCTION uint32_t bits_of(float value)
{
    const union { float value; uint32_t bits; } both = {value};
    return both.bits;
}
""",
    "away": """\
/* x moved away from zero by a count of ulps. */
FUNCTION float away(float x, float count)
{
    return float_of(bits_of(x) + (uint32_t)(int32_t)count);
}
""",
    "ulps": """\
/* The ulps from y away from zero to x, of one sign; 0 where x is NaN. */
FUNCTION float ulps(float x, float y)
{
    const int32_t count = (int32_t)(bits_of(x) - bits_of(y));
    return x != x ? 0.0f : (float)count;
}
""",
    "coarse": """\
/* x moved away from zero by a count of ulps, its lowest 16 bits cleared; x where it is not finite. */
FUNCTION float coarse(float x, float count)
{
    const uint32_t bits = (bits_of(x) + (uint32_t)(int32_t)count) & 0xffff0000;
    return isfinite(x) ? float_of(bits) : x;
}
""",
    "prefetch": """\
/* Asks for the memory a kilobyte behind some bytes, so that it comes while these are worked on; there may be none. */
FUNCTION void prefetch(const void *address, int64_t bytes)
{
#if defined(__GNUC__)
    for (int64_t i = 1024; i < 1024 + bytes; i += 64)
        __builtin_prefetch((const void *)((uintptr_t)address + (uintptr_t)i));
#endif
}
""",
    "scrambled": """\
/* lowbias32, the mixing function of Chris Wellons (hash-prospector, 2018). */
FUNCTION uint32_t scrambled(uint32_t x)
{
    x = (x ^ x >> 16) * 0x7feb352d;
    x = (x ^ x >> 15) * 0x846ca68b;
    return x ^ x >> 16;
}
""",
    "chance": """\
/* The random number below 2**16 of the element at a position, for a seed of two halves, a tensor, a step and a draw.
 * The upper half of the position is one more than that of the origin where the lower one is less. */
FUNCTION float chance(
    int64_t position, int64_t origin, float seed_low, float seed_high, float number, float step, float draw)
{
    const uint32_t t = (uint32_t)step, golden = 0x9e3779b9, silver = 0x6a09e667;
    const uint32_t seed = (uint32_t)seed_low + ((uint32_t)seed_high << 16);
    const uint32_t stream = scrambled(scrambled((uint32_t)number + ((uint32_t)draw << 24)) ^ seed);
    const uint32_t first = scrambled(stream ^ t) + (uint32_t)(origin >> 32) * silver;
    const uint32_t second = scrambled(stream * golden + t), low = (uint32_t)position;
    const uint32_t counter = low * golden + (low < (uint32_t)origin ? first + silver : first);
    const uint32_t mixed = (counter ^ counter >> 16) * 0x7feb352d + second;
    return (float)(int32_t)((mixed ^ mixed >> 15) * 0x846ca68b >> 16);
}
""",
    "in_range": """\
/* The place in a whole tensor of the element at a position of a part that is one range from a start on. */
FUNCTION int64_t in_range(int64_t position, float start_low, float start_high)
{
    return position + (int64_t)start_low + (int64_t)start_high * 16777216;
}
""",
    "in_rows": """\
/* The same of a part that is rows of a width with gaps between them. */
FUNCTION int64_t in_rows(
    int64_t position, float start_low, float start_high, float width_low, float width_high, float gap_low,
    float gap_high)
{
    const int64_t width = in_range(0, width_low, width_high), gap = in_range(0, gap_low, gap_high);
    return in_range(position, start_low, start_high) + position / width * gap;
}
""",
    "line_at": """\
/* slope*x + start, rounded once or twice, whichever is faster: for results that may be either. */
FUNCTION float line_at(float slope, float x, float start)
{
#ifdef FP_FAST_FMAF
    return fmaf(slope, x, start);
#else
    return slope * x + start;
#endif
}
""",
    "lower_line": """\
/* The lower one of a line so far and slope*x + start. */
FUNCTION float lower_line(float so_far, float slope, float x, float start)
{
    const float other = line_at(slope, x, start);
    return other < so_far ? other : so_far;
}
""",
    "to_odd": """\
/* The next float towards zero, its last bit set where x lies beyond it: rounded once more, to 16 bits, that gives
 * what rounding x at once would. A NaN is the one that has only its highest fraction bit set. */
FUNCTION float to_odd(double x)
{
    const float near = (float)x;
    const double back = near;
    const uint32_t toward_zero = bits_of(near) - (fabs(back) > fabs(x) ? 1 : 0);
    return float_of(x != x ? 0x7fc00000 : toward_zero | (back < x || back > x ? 1 : 0));
}
""",
    "from_bfloat16": """\
/* The number that a bfloat16 is. */
FUNCTION float from_bfloat16(uint16_t bits)
{
    return float_of((uint32_t)bits << 16);
}
""",
    "to_bfloat16": """\
/* The nearest bfloat16, halves to even. */
FUNCTION uint16_t to_bfloat16(float x)
{
    const uint32_t bits = bits_of(x);
    const uint32_t near = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)(x != x ? 0x7fc0 : near);
}
""",
    "upper_half": """\
/* A float whose lower half is clear, as a bfloat16: its upper half. */
FUNCTION uint16_t upper_half(float x)
{
    return (uint16_t)(x != x ? 0x7fc0 : bits_of(x) >> 16);
}
""",
    "from_float16": """\
/* The number that a float16 is: its exponent lies 112 lower than a float's; that of infinities and NaN is the highest
 * of either. */
FUNCTION float from_float16(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t size = (uint32_t)(half & 0x7fff) << 13;
    const float finite = float_of(size) * 5192296858534827628530496329220096.0f;
    return float_of(sign | (size < 0x0f800000 ? bits_of(finite) : size | 0x7f800000));
}
""",
    "to_float16": """\
/* The nearest float16, halves to even. Below the normal numbers, adding 0.5 rounds to what their last bit counts. */
FUNCTION uint16_t to_float16(float x)
{
    const uint32_t sign = bits_of(x) >> 16 & 0x8000;
    const uint32_t size = bits_of(x) & 0x7fffffff;
    const uint32_t tiny = bits_of(float_of(size) + 0.5f) - 0x3f000000;
    const uint32_t near = (size - 0x38000000 + 0x0fff + (size >> 13 & 1)) >> 13;
    const uint32_t beyond = size > 0x7f800000 ? 0x7e00 : 0x7c00;
    return (uint16_t)(sign | (size < 0x38800000 ? tiny : size < 0x47800000 ? near : beyond));
}
""",
}


#: The text of each function by its name, after the functions it calls.
WORDS: Mapping[str, str] = {
    **{name + suffix: typed(text, suffix) for name, text in _TYPED.items() for suffix in ("f", "")},
    **{name + suffix: _bounded(text, suffix) for name, text in _QUOTIENTS.items() for suffix in ("f", "")},
    **_PLAIN,
    **NOISE_WORDS,
}

_MATH_H = "sqrt cbrt hypot exp expm1 log log1p pow tanh erf sin cos floor fabs fma fmod copysign"

#: Functions of math.h that a printed source calls, in both types.
LIBRARY = frozenset(f"{name}{suffix}" for name in _MATH_H.split() for suffix in ("", "f"))

_KEYWORDS = """
    int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t size_t ptrdiff_t intptr_t uintptr_t
    INFINITY NAN NULL HUGE_VAL HUGE_VALF HUGE_VALL RULEC_FUNCTION assert linux unix main
    isfinite isinf isnan isnormal signbit fpclassify isgreater isgreaterequal isless islessequal islessgreater
    isunordered
    auto bool break case char const continue default do double else enum extern false float for goto if inline int long
    register restrict return short signed sizeof static struct switch true typedef union unsigned void volatile while
    alignas alignof and and_eq asm bitand bitor catch char8_t char16_t char32_t class co_await co_return co_yield compl
    concept const_cast consteval constexpr constinit decltype delete dynamic_cast explicit export friend mutable
    namespace new noexcept not not_eq nullptr operator or or_eq private protected public reinterpret_cast requires
    static_assert static_cast template this thread_local throw try typeid typename using virtual wchar_t xor xor_eq
"""

#: Names that no value of a rule may have: called functions, types, macros, and the words of C and C++. A value may hide
#: any other function of a library.
RESERVED = frozenset(WORDS) | LIBRARY | frozenset(_KEYWORDS.split())


def words_used(text: str, dialect: Dialect) -> list[str]:
    """The texts of all functions that `text` calls, directly or not, each before its use."""
    spelled = {
        rf"\b{name}\(": dialect.words.get(name) or plain.replace("FUNCTION", dialect.function)
        for name, plain in WORDS.items()
    }
    return used(spelled, text, _without_comments)


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
