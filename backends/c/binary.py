"""Binary layers in C99: the product of packed bits, of all members, with OpenMP's threads."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from rulec.backend.binary import Window
from rulec.es.binary.reference import ReferenceKernels

from ..cpu.address import array_address
from ..cpu.binary_plan import TABLE, Plan
from .compile import library
from .threads import threads

Array = np.ndarray[Any, Any]

#: Lines that are taken in one pass over the results.
TOGETHER = 4


class CBinary(ReferenceKernels):
    """The kernels for NumPy arrays; bits are drawn and added up as the reference does it."""

    def convolve(self, inputs: Array, weights: Array, window: Window) -> Array:
        """2*(equal bits) - (all bits), int32 of shape `window.shape`."""
        results = np.empty(window.shape, np.int32)
        if results.size:
            plan = Plan.of(window)
            arrays = (inputs, weights, np.empty(weights.size, np.uint64), results, *plan.tables)
            words = (*map(array_address, arrays), *plan.sizes, plan.lines, plan.spans, threads(plan.spans))
            _function()((ctypes.c_int64 * len(words))(*words))
        return results


@functools.cache
def _function() -> Any:
    found = library("binary_product", source()).multiply_bits
    found.restype = None
    return found


def source() -> str:
    """The source of the product."""
    pointers = {name: kind for kind, names in _POINTERS.items() for name in names}
    fields = [f"    {pointers.get(name, 'int64_t ')}{name};" for name in (*TABLE, "arranged", "spans", "threads")]
    return (
        _TEXT.replace("<fields>", "\n".join(fields))
        .replace("<group>", _group(TOGETHER))
        .replace("<one>", _group(1))
        .replace("<together>", str(TOGETHER))
    )


_POINTERS = {
    "const uint64_t *": ("inputs", "weights"), "uint64_t *": ("lines",), "int32_t *": ("results",),
    "const int64_t *": ("kinds", "kind_of", "first"),
}  # fmt: skip


def _group(count: int) -> str:
    """The statements that take so many words, from `at` on, into a row of results."""
    lines = [f"const uint64_t x{i} = own[kind[2 + at + {i}]];" for i in range(count)]
    lines += [
        f"const uint64_t *restrict w{i} = of + p->outputs * kind[2 + p->places + at + {i}];" for i in range(count)
    ]
    differing = " + ".join(f"popcount(x{i} ^ w{i}[j])" for i in range(count))
    lines += ["for (int64_t j = left; j < right; j++)", f"    row[j] -= 2 * (int32_t)({differing});"]
    return "\n            ".join(lines)


_TEXT = """\
/* The product of packed bits: equal bits less different ones, for all members of a population. Printed by rulec. */
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
static void multiply_row(const Product *p, const int64_t *kind, const uint64_t *own, const uint64_t *of,
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
        const uint64_t *own = p->inputs + p->input_words * (p->samples * member + sample) + p->first[position];
        const int64_t *kind = p->kinds + (2 + 2 * p->places) * p->kind_of[position];
        multiply_row(p, kind, own, of, p->results + p->outputs * (rows * member + number), left, right);
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
"""
