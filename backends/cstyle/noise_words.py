"""Helpers of noise, as text for C99 and CUDA C alike: random words, the values of their bits, and draws of packed bits.

Normal numbers come from sums, products and square roots alone, with the same bits wherever nothing is contracted. In
float they differ by at most 4 ulp from Box and Muller's in float64, as tests/backends/test_noise_c.py measures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..common.noise import normal_marks
from ..common.text import filled

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


def typed(template: str, suffix: str) -> str:
    """A template of `REAL`, float or double: a name followed by `F` has the suffix of the type."""
    real, one = ("float", "1.0f") if suffix else ("double", "1.0")
    text = template.replace("REAL", real).replace("ONE", one).replace("HALF", f"0.5{suffix}")
    return re.sub(r"\b(\w+)F\b", rf"\1{suffix}", text)


def _of_normals(template: str, suffix: str) -> str:
    marks = normal_marks(not suffix, lambda value: f"{value:.9g}f" if suffix else repr(value))
    text = filled(template, {"<logarithm>": "log_of_normalf" if suffix else "log", **marks})
    return typed(text, suffix)


#: The text of each function by its name, after the functions it calls. `philox` has the type `Words` too.
NOISE_WORDS: Mapping[str, str] = {
    "philox": _PHILOX,
    "set_bits": _SET_BITS,
    "less_four": _BELOW_FOUR,
    "signed_byf": _SIGNED_FLOAT,
    "signed_by": typed(_SIGNED, ""),
    "log_of_normalf": _of_normals(_LOG, "f"),
    "normalsf": _of_normals(_NORMAL, "f"),
    "normals": _of_normals(_NORMAL, ""),
}


#: The sizes and numbers of a draw, after its addresses.
DRAW = ("members", "rows", "count", "words", "directions", "purpose", "step", "seed", "layer")

_DRAW = """\
/* The bits of members, `rows` lines of `count` for each, from the thresholds of one. */
typedef struct {
    const uint32_t *thresholds;
    uint64_t *results;
    int64_t <fields>;
} Draw;

/* The words of a block of elements. */
FUNCTION Words words_of(const Draw *draw, int64_t block, int64_t direction)
{
    const uint32_t high = (uint32_t)(block >> 32) + ((uint32_t)draw->purpose << 16);
    return philox((uint32_t)block, high, (uint32_t)direction, (uint32_t)draw->step, (uint32_t)draw->seed,
                  (uint32_t)draw->layer);
}

/* The bits of one word: 1 where an element's random word is below its threshold; of the second sign, its complement. */
FUNCTION void draw_word(const Draw *draw, int64_t index)
{
    const int64_t line = index / draw->words, number = index - line * draw->words;
    const int64_t member = line / draw->rows, row = line - member * draw->rows;
    const int opposite = member >= draw->directions;
    const int64_t direction = opposite ? member - draw->directions : member;
    const uint32_t flip = opposite ? 0xffffffff : 0;
    const int64_t first = draw->count * row + 64 * number, left = draw->count - 64 * number;
    const int64_t inside = left < 64 ? left : 64;
    uint64_t bits = 0;
    for (int64_t block = first / 4; 4 * block < first + inside; block++) {
        const Words words = words_of(draw, block, direction);
        for (int i = 0; i < 4; i++) {
            const int64_t at = 4 * block + i - first;
            if (at >= 0 && at < inside && (words.at[i] ^ flip) < draw->thresholds[first + at])
                bits |= (uint64_t)1 << at;
        }
    }
    draw->results[index] = bits;
}
"""


def draw_words(function: str) -> str:
    """The text; `function` stands before each function."""
    text = NOISE_WORDS["philox"] + "\n" + _DRAW.replace("<fields>", ", ".join(DRAW))
    return text.replace("FUNCTION", function)
