"""Binary layers in C99, for all members of a population, with OpenMP's threads.

The printed source has products of packed bits, draws of them, and their weighted sums.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rulec.backend.capabilities import Window
from rulec.kernel.multi_tensor.address import array_address

from ..common.binary import TABLE, PackedBits, Plan
from ..common.text import filled
from ..cstyle.noise_words import DRAW, draw_words
from .call import most, threads
from .compile import library

Array = np.ndarray[Any, Any]


class CBinary(PackedBits):
    """The kernels for NumPy arrays."""

    def __init__(self) -> None:
        super().__init__(np)

    def _multiply(self, inputs: Array, weights: Array, results: Array, window: Window) -> None:
        plan = Plan.of(window)
        arrays = (inputs, weights, np.empty(weights.size, np.uint64), results, *plan.tables)
        _call("multiply_bits", arrays, (*plan.sizes, plan.lines, plan.spans, threads(plan.spans)))

    def _draw(self, thresholds: Array, results: Array, sizes: Mapping[str, int]) -> None:
        _call("draw_bits", (thresholds, results), [sizes[name] for name in DRAW], most())

    def _add(self, words: Array, weights: Array, sums: Array, sizes: Mapping[str, int]) -> None:
        _call("add_bits", (words, weights, sums), (sizes["members"], sizes["total"]), most())


def _call(name: str, arrays: Sequence[Array], sizes: Sequence[int], *more: int) -> None:
    """Calls a function of the library with a table of addresses and sizes, and with numbers after it."""
    words = [*map(array_address, arrays), *sizes]
    function = getattr(_library(), name)
    function.restype = None
    function((ctypes.c_int64 * len(words))(*words), *map(ctypes.c_int64, more))


@functools.cache
def _library() -> ctypes.CDLL:
    return library("binary", source())


#: Lines joined in one pass over the results.
TOGETHER = 4

#: The numbers of a product after the sizes of its plan: the spans of its two loops, and their threads.
BEHIND = ("arranged", "spans", "threads")

_POINTERS = {
    "inputs": "const uint64_t *", "weights": "const uint64_t *", "lines": "uint64_t *", "results": "int32_t *",
    "kinds": "const int64_t *", "kind_of": "const int64_t *", "first": "const int64_t *",
}  # fmt: skip


def source() -> str:
    """The source: functions `multiply_bits`, `draw_bits` and `add_bits`."""
    parts = {
        "<fields>": "\n".join(f"    {_POINTERS.get(name, 'int64_t ')}{name};" for name in (*TABLE, *BEHIND)),
        "<group>": _group(TOGETHER), "<one>": _group(1), "<together>": str(TOGETHER),
        "<draw>": draw_words("static inline"),
    }  # fmt: skip
    return filled(_TEXT, parts)


def _group(count: int) -> str:
    """The statements that join `count` words, from `at` on, to a row of results."""
    line = "const uint64_t *restrict w{0} = of + p->outputs * kind[2 + p->places + at + {0}];"
    lines = [f"const uint64_t x{i} = inputs[kind[2 + at + {i}]];" for i in range(count)]
    lines += [line.format(i) for i in range(count)]
    differing = " + ".join(f"popcount(x{i} ^ w{i}[j])" for i in range(count))
    lines += ["for (int64_t j = left; j < right; j++)", f"    row[j] -= 2 * (int32_t)({differing});"]
    return "\n        ".join(lines)


_TEXT = """\
/* Binary layers: packed bits are multiplied, drawn and added up, of all members of a population. Printed by rulec. */
#include <stdint.h>

/* All that a product is of: rows are samples times positions, a place is a word of the kernel. */
typedef struct {
<fields>
} Product;

#if defined(__GNUC__)
static inline int64_t popcount(uint64_t word) { return __builtin_popcountll(word); }
#else
static inline int64_t popcount(uint64_t word)
{
    word -= word >> 1 & 0x5555555555555555u;
    word = (word & 0x3333333333333333u) + (word >> 2 & 0x3333333333333333u);
    word = (word + (word >> 4)) & 0x0f0f0f0f0f0f0f0fu;
    return (int64_t)(word * 0x0101010101010101u >> 56);
}
#endif

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* One line: the words at one place of a member's weights, of all outputs. */
static void arrange(const Product *p, int64_t span)
{
    const int64_t place = span % p->places;
    const uint64_t *of = p->weights + p->outputs * (span - place) + place;
    uint64_t *restrict line = p->lines + p->outputs * span;
    for (int64_t j = 0; j < p->outputs; j++)
        line[j] = of[j * p->places];
}

/* One row, for a block of its outputs; `kind` says which words of the kernel are inside the inputs. */
static void multiply_row(const Product *p, const int64_t *kind, const uint64_t *inputs, const uint64_t *of,
                         int32_t *restrict row, int64_t left, int64_t right)
{
    const int64_t inside = kind[0];
    for (int64_t j = left; j < right; j++)
        row[j] = (int32_t)kind[1];
    int64_t at = 0;
    for (; at + <together> <= inside; at += <together>) {
        <group>
    }
    for (; at < inside; at++) {
        <one>
    }
}

/* A part of a member's rows, for a block of its outputs. */
static void multiply(const Product *p, int64_t span)
{
    const int64_t left = p->block * (span % p->blocks), right = least(p->outputs, left + p->block);
    const int64_t begin = p->part * (span / p->blocks % p->parts), rows = p->samples * p->positions;
    const int64_t end = least(rows, begin + p->part), member = span / p->blocks / p->parts;
    const uint64_t *of = p->lines + p->outputs * p->places * member;
    for (int64_t number = begin; number < end; number++) {
        const int64_t sample = number / p->positions, position = number % p->positions;
        const uint64_t *inputs = p->inputs + p->input_words * (p->samples * member + sample) + p->first[position];
        const int64_t *kind = p->kinds + (2 + 2 * p->places) * p->kind_of[position];
        multiply_row(p, kind, inputs, of, p->results + p->outputs * (rows * member + number), left, right);
    }
}

void multiply_bits(const Product *p)
{
#pragma omp parallel for schedule(dynamic) num_threads((int)p->threads)
    for (int64_t span = 0; span < p->arranged; span++)
        arrange(p, span);
#pragma omp parallel for schedule(dynamic) num_threads((int)p->threads)
    for (int64_t span = 0; span < p->spans; span++)
        multiply(p, span);
}

<draw>
void draw_bits(const Draw *draw, int64_t threads)
{
#pragma omp parallel for num_threads((int)threads)
    for (int64_t index = 0; index < draw->members * draw->rows * draw->words; index++)
        draw_word(draw, index);
}

/* What a sum is of: for each of `total` words 64 sums, over members in order. */
typedef struct {
    const uint64_t *inputs;
    const double *weights;
    double *sums;
    int64_t members, total;
} Sum;

static void add_word(const Sum *sum, int64_t index)
{
    double *restrict line = sum->sums + 64 * index;
    for (int64_t member = 0; member < sum->members; member++) {
        const uint64_t word = sum->inputs[sum->total * member + index];
        const double weight = sum->weights[member];
        for (int bit = 0; bit < 64; bit++)
            line[bit] += word >> bit & 1 ? weight : 0.0;
    }
}

void add_bits(const Sum *sum, int64_t threads)
{
#pragma omp parallel for num_threads((int)threads)
    for (int64_t index = 0; index < sum->total; index++)
        add_word(sum, index);
}
"""
