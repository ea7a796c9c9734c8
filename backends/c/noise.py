"""Prints C99 for updates with a sum of noise in place of a gradient, tile by tile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout

from ..common.noise import ELEMENTS, RECORD, require_estimate, sum_dtype
from ..common.text import filled
from ..cstyle.dialect import block
from ..cstyle.element import STORAGE
from .source import C99, StageSource, file_text

#: Elements of a tile: with their random words they fit in the nearest cache.
TILE = 1024

_TYPES = """\
/* A direction and its weight. */
typedef struct {
    int64_t number;
    double weight;
} Direction;

/* Noise in the place of a gradient: how many bytes behind it its directions begin and how many there are, its
 * key, what is added to the upper half of a block's number, the step, and the element that the tensor's first
 * one is. */
typedef struct {
    int64_t <record>;
} Noise;

/* Elements of a tile, what there is of a gradient at once; blocks of words that they are made of. */
enum { TILE = <tile>, BLOCKS = TILE / <each> };
"""

_WORDS = """\
/* The words of some blocks, from number `first` on. */
static void make_words(const Noise *noise, int64_t number, int64_t first, int blocks, uint32_t *words)
{
    const uint32_t seed = (uint32_t)noise->seed, layer = (uint32_t)noise->layer, step = (uint32_t)noise->step;
    const uint32_t low = (uint32_t)first, high = (uint32_t)(first >> 32) + (uint32_t)noise->high;
    const uint32_t direction = (uint32_t)number;
#pragma omp simd
    for (int b = 0; b < blocks; b++) {
        const uint32_t block = low + (uint32_t)b;
        const Words quad = philox(block, high + (block < low), direction, step, seed, layer);
        words[4 * b] = quad.at[0];
        words[4 * b + 1] = quad.at[1];
        words[4 * b + 2] = quad.at[2];
        words[4 * b + 3] = quad.at[3];
    }
}
"""

_SUM = """\
/* The sum of noise for `count` elements from `first` on, a multiple of <each>: direction by direction, in order. */
static void sum_noise(const Noise *noise, int64_t first, int count, <real> *sums)
{
    const int blocks = (count + <last>) / <each>;
    const Direction *directions = (const Direction *)((const char *)noise + noise->directions);
    uint32_t words[4 * BLOCKS];
<begin>
    for (int64_t d = 0; d < noise->count; d++) {
        const <real> weight = (<real>)directions[d].weight;
        make_words(noise, directions[d].number, (noise->offset + first) / <each>, blocks, words);
<add>
    }
<end>}
"""

_ZERO = """\
    for (int e = 0; e < <each> * blocks; e++)
        sums[e] = 0;"""

#: One array of sums for each byte of a word, so that vectors add the same byte of neighbouring words.
_PLANES = """\
    <real> planes[4][4 * BLOCKS] = {{0}};  // the sums of each word's first bytes, second bytes and so on"""

_TOGETHER = """\
    for (int w = 0; w < 4 * blocks; w++)
        for (int byte = 0; byte < 4; byte++)
            sums[4 * w + byte] = planes[byte][w];
"""

#: The statements that add the values of a word, or of two, by kind.
_ADD: Mapping[str, str] = {
    "popcount": """\
#pragma omp simd
        for (int w = 0; w < 4 * blocks; w++) {
            const uint32_t bits = set_bits(words[w]);
            planes[0][w] += weight * less_four(bits & 255);
            planes[1][w] += weight * less_four(bits >> 8 & 255);
            planes[2][w] += weight * less_four(bits >> 16 & 255);
            planes[3][w] += weight * less_four(bits >> 24);
        }""",
    "rademacher": """\
        for (int w = 0; w < 4 * blocks; w++) {
#pragma omp simd
            for (int bit = 0; bit < 32; bit++)
                sums[32 * w + bit] += signed_by<f>(words[w] >> bit & 1, weight);
        }""",
    "normal": """\
#pragma omp simd
        for (int w = 0; w < 2 * blocks; w++) {
            <real> x, y;
            normals<f>(words[2 * w], words[2 * w + 1], &x, &y);
            sums[2 * w] += weight * x;
            sums[2 * w + 1] += weight * y;
        }""",
}

#: C99 with the names of the functions of noise.
_NOISY = replace(
    C99,
    reserved=C99.reserved | {"Noise", "Direction", "Words", "TILE", "BLOCKS", "noise", "sums", "tile", "count", "e"}
    | {"make_words", "sum_noise", "number", "directions"},
)  # fmt: skip


def estimate_source(program: Program, layout: Layout, values: str) -> str:
    """The whole file. BackendUnsupported as in `require_estimate`."""
    require_estimate("c", program, values)
    title = f"C99 for {layout.text()}, its gradient a sum of {values} noise."
    return file_text(program, layout, title, [_NoisyStage(program, layout, values)])


class _NoisyStage(StageSource):
    """The one stage of a rule with a sum of noise for its gradient."""

    dialect = _NOISY

    def __init__(self, program: Program, layout: Layout, values: str) -> None:
        super().__init__(program, layout, 0)
        self.values = values
        self.real = "double" if sum_dtype(layout) == "float64" else "float"

    def text(self) -> str:
        """The types and functions of noise, and the functions of a stage."""
        each, apart = ELEMENTS[self.values], self.values == "popcount"
        marks = {
            "<tile>": TILE, "<add>": _ADD[self.values], "<begin>": _PLANES if apart else _ZERO,
            "<end>": _TOGETHER if apart else "", "<each>": each, "<last>": each - 1, "<real>": self.real,
            "<f>": "f" if self.real == "float" else "", "<record>": ", ".join(RECORD),
        }  # fmt: skip
        return "\n".join([filled("\n".join([_TYPES, _WORDS, _SUM]), marks), super().text()])

    def _variable(self, name: str, kind: str) -> str:
        return "const Noise *noise" if name == "g" else super()._variable(name, kind)

    def _loop(self, start: str, stop: str, body: list[str]) -> list[str]:
        """A loop over tiles of a gradient."""
        at = {p.name: f"{p.name} + i" for p in self.write.parameters() if p.kind in ("buffer", "vector")}
        call = self.write.call({**at, "i": "e", self.write.at["g"]: self._stored_in()})
        return block(
            f"for (int64_t i = {start}; i < {stop}; i += TILE)",
            [
                f"const int count = (int)({stop} - i < TILE ? {stop} - i : TILE);",
                f"{self.real} sums[TILE];",
                "sum_noise(noise, i, count, sums);",
                *self._rounding(),
                "#pragma omp simd",
                *block("for (int e = 0; e < count; e++)", call),
            ],
        )

    def _stored_in(self) -> str:
        return "sums" if STORAGE[self.layout.dtype("g")] == self.real else "tile"

    def _rounding(self) -> list[str]:
        """The lines that round a tile to the gradient's dtype, if it is narrower."""
        dtype = self.layout.dtype("g")
        if self._stored_in() == "sums":
            return []
        loop = block("for (int e = 0; e < count; e++)", [f"tile[e] = to_{dtype}(sums[e]);"])
        return [f"{STORAGE[dtype]} tile[TILE];", "#pragma omp simd", *loop]
