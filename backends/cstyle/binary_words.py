"""Drawing packed bits, as text for C99 and CUDA C alike."""

from __future__ import annotations

from .noise_words import NOISE_WORDS

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
    uint64_t found = 0;
    for (int64_t block = first / 4; 4 * block < first + inside; block++) {
        const Words words = words_of(draw, block, direction);
        for (int i = 0; i < 4; i++) {
            const int64_t at = 4 * block + i - first;
            if (at >= 0 && at < inside && (words.at[i] ^ flip) < draw->thresholds[first + at])
                found |= (uint64_t)1 << at;
        }
    }
    draw->results[index] = found;
}
"""


def draw_words(function: str) -> str:
    """The text; `function` stands before each function."""
    text = NOISE_WORDS["philox"] + "\n" + _DRAW.replace("<fields>", ", ".join(DRAW))
    return text.replace("FUNCTION", function)
