"""Functions of noise, as text that is both C99 and CUDA C: random words, and what their bits stand for.

Normal numbers come from sums, products and square roots alone, the same bits wherever nothing is contracted. Those of
float are off by at most 4 ulp from Box and Muller's of float64, as tests/backends/test_noise_c.py measures them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

_PHILOX = """\
/* Four words of 32 bits. */
typedef struct {
    uint32_t at[4];
} Words;

/* The words of a block: Philox4x32-10 of a counter and a key of such words. */
FUNCTION Words philox(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t seed, uint32_t layer)
{
    for (int round = 0; round < 10; round++) {
        const uint64_t one = (uint64_t)a * 0xd2511f53, other = (uint64_t)c * 0xcd9e8d57;
        a = (uint32_t)(other >> 32) ^ b ^ seed;
        b = (uint32_t)other;
        c = (uint32_t)(one >> 32) ^ d ^ layer;
        d = (uint32_t)one;
        seed += 0x9e3779b9;
        layer += 0xbb67ae85;
    }
    const Words words = {{a, b, c, d}};
    return words;
}
"""

_SET_BITS = """\
/* How many bits are set in each byte of a word, in the same byte. */
FUNCTION uint32_t set_bits(uint32_t word)
{
    word -= word >> 1 & 0x55555555;
    word = (word & 0x33333333) + (word >> 2 & 0x33333333);
    return (word + (word >> 4)) & 0x0f0f0f0f;
}
"""

_SIGNED = """\
/* A weight with the sign that a bit stands for: negative where it is set. */
FUNCTION REAL signed_byF(uint32_t bit, REAL weight)
{
    return bit ? -weight : weight;
}
"""

_SIGNED_FLOAT = """\
/* A weight with the sign that a bit stands for: negative where it is set. */
FUNCTION float signed_byf(uint32_t bit, float weight)
{
    return float_of(bits_of(weight) ^ bit << 31);
}
"""

_BELOW_FOUR = """\
/* A byte less 4: its bits behind those of 2**23 are a float. */
FUNCTION float less_four(uint32_t byte)
{
    return float_of(0x4b000000 | byte) - 8388612.0f;
}
"""

_LOG = """\
/* The natural logarithm of a positive float that is not subnormal: of a power of two, and of a number between
 * sqrt(1/2) and sqrt(2), which is 1 more than `f`. */
FUNCTION float log_of_normalf(float x)
{
    const uint32_t bits = bits_of(x) + 0x004afb0d;
    const float k = (float)((int)(bits >> 23) - 127);
    const float f = float_of((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
    const float square = f * f;
    const float rest = square * f * <log>;
    return k * 0.693145752f + (f - (square * 0.5f - (rest + k * 1.42860677e-06f)));
}
"""

_NORMAL = """\
/* Two standard normal numbers from two words, by Box and Muller's method. The angle is brought to an eighth of
 * a turn around a whole quarter exactly, while it is a whole number. */
FUNCTION void normalsF(uint32_t first, uint32_t second, REAL *x, REAL *y)
{
    const REAL uniform = ((REAL)(int)(first >> 9) + HALF) * <cell>;
    const REAL radius = sqrtF(-2 * <logarithm>(uniform));
    const int turn = (int)(second >> 9), quarter = (turn + (1 << 20)) >> 21;
    const REAL angle = ((REAL)(turn - quarter * (1 << 21)) + HALF) * <angle>;
    const REAL square = angle * angle;
    const REAL sine = angle + angle * (square * <sine>);
    const REAL cosine = ONE + square * <cosine>;
    const REAL along = quarter & 1 ? sine : cosine, across = quarter & 1 ? cosine : sine;
    *x = radius * ((quarter + 1) & 2 ? -along : along);
    *y = radius * (quarter & 2 ? -across : across);
}
"""

#: (log(1 + f) - f + f**2/2)/f**3 for f from sqrt(1/2) - 1 to sqrt(2) - 1, at Chebyshev's points: good to 2**-27.
_LOG_TERMS = (
    0.3333333134651184, -0.2499999701976776, 0.20000715553760529, -0.1666780263185501, 0.14249058067798615,
    -0.12425687164068222, 0.11685419827699661, -0.11479733884334564, 0.06971611827611923,
)  # fmt: skip

#: How many terms of the series of sine and cosine an eighth of a turn needs, beside the first.
SERIES = {"float": (4, 5), "double": (8, 9)}


def sine_terms(count: int) -> list[float]:
    """The coefficients of sin(x)/x - 1 by powers of x**2."""
    return [(-1) ** n / math.factorial(2 * n + 1) for n in range(1, count + 1)]


def cosine_terms(count: int) -> list[float]:
    """The coefficients of cos(x) - 1 by powers of x**2."""
    return [(-1) ** n / math.factorial(2 * n) for n in range(1, count + 1)]


def log_terms() -> Sequence[float]:
    """The coefficients of the logarithm's rest, by powers of f."""
    return _LOG_TERMS


def _polynomial(name: str, terms: Sequence[float], suffix: str) -> str:
    """A polynomial by Horner's scheme."""
    text = _number(terms[-1], suffix)
    for term in reversed(terms[:-1]):
        text = f"({_number(term, suffix)} + {name} * {text})"
    return text


def _number(value: float, suffix: str) -> str:
    return f"{value:.9g}f" if suffix else repr(value)


def _typed(template: str, suffix: str) -> str:
    real = "float" if suffix else "double"
    sines, cosines = SERIES[real]
    parts = {
        "<log>": _polynomial("f", _LOG_TERMS, "f"), "<logarithm>": "log_of_normalf" if suffix else "log",
        "<cell>": _number(2.0**-23, suffix), "<angle>": _number(2 * math.pi * 2.0**-23, suffix),
        "<sine>": _polynomial("square", sine_terms(sines), suffix),
        "<cosine>": _polynomial("square", cosine_terms(cosines), suffix),
        "REAL": real, "ONE": _number(1.0, suffix) if not suffix else "1.0f", "HALF": f"0.5{suffix}",
    }  # fmt: skip
    for mark, text in parts.items():
        template = template.replace(mark, text)
    return re.sub(r"\b(\w+)F\b", rf"\1{suffix}", template)


#: The text of each function by its name, those it calls before it; beside them a type.
NOISE_WORDS: Mapping[str, str] = {
    "philox": _PHILOX,
    "set_bits": _SET_BITS,
    "less_four": _BELOW_FOUR,
    "signed_byf": _SIGNED_FLOAT,
    "signed_by": _typed(_SIGNED, ""),
    "log_of_normalf": _typed(_LOG, "f"),
    "normalsf": _typed(_NORMAL, "f"),
    "normals": _typed(_NORMAL, ""),
}
