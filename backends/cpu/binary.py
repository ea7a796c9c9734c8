"""Binary layers on the CPU: products of packed bits in machine code, for all members and with several threads.

The sources of the kernels are products of packed bits, draws of them, and their weighted sums. One job of a kernel
serves all members of a population. It points to a table of addresses and sizes.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rulec.backend.capabilities import Window
from rulec.kernel.multi_tensor.address import array_address

from ..common import threads as cpu_threads
from ..common.binary import TABLE, PackedBits, Plan
from ..common.threads import POINTERS, STAGE, Job
from .machine import ObjectCode, loaded
from .noise_words import HIGH, KEY, STEP
from .random import BLOCKS
from .source import kernel_text, spans_kernel

#: The stages of a product: weights are arranged by lines of equal places, then multiplied.
ARRANGE, MULTIPLY = range(2)

#: Lines joined in one pass over the results.
TOGETHER = 4

#: The tables of drawing and of sums: addresses, then sizes. A draw's begins like a record of noise.
_POSITION = {KEY: "seed", KEY + 1: "layer", HIGH: "high", STEP: "step"}
DRAW_TABLE = (
    *(_POSITION.get(i, f"unused_{i}") for i in range(max(_POSITION) + 1)),
    "thresholds", "results", "rows", "count", "words", "directions",
)  # fmt: skip
SUM_TABLE = ("inputs", "weights", "sums", "members", "total", "part")

#: Elements with words made together.
_MADE = 4 * BLOCKS


def product_source() -> str:
    """The source of the kernel that multiplies."""
    multiply = _MULTIPLY.replace("<group>", _group(TOGETHER)).replace("<one>", _group(1))
    return _source("The product of packed bits", TABLE, [_ARRANGE, multiply])


def draw_source() -> str:
    """The source of the kernel that draws."""
    return _source("Bits drawn from thresholds", DRAW_TABLE, [_DRAW])


def sum_source() -> str:
    """The source of the kernel that adds up."""
    return _source("Weighted sums of bits", SUM_TABLE, [_SUM])


def _source(title: str, table: Sequence[str], functions: Sequence[str]) -> str:
    """The source of a kernel; each of these functions of a span is one stage."""
    named = "\n    ".join(f"{name} = word(table, {index})" for index, name in enumerate(table))
    texts = [f"@compiled\n{text}".replace("<names>", named) for text in functions]
    names = [re.findall(r"^def (\w+)", text)[0] for text in functions]
    calls = [line for i, name in enumerate(names) for line in (f"if stage == {i}:", f"    {name}(table, span)")]
    kernel = spans_kernel("spans", [f"table, stage = word(job, {POINTERS}), word(job, {STAGE})"], calls)
    return kernel_text(title, "\n\n".join([*texts, kernel.lstrip("\n")]))


def _group(count: int) -> str:
    """The statements that join `count` places, from `place` on, to a row of results."""
    lines = [f"x{i} = word(own, word(kind, 2 + place + {i}))" for i in range(count)]
    lines += [f"w{i} = of + 8 * outputs * word(kind, 2 + places + place + {i})" for i in range(count)]
    differing = " + ".join(f"popcount(x{i} ^ load_bits_float64(w{i}, j, 0))" for i in range(count))
    lines += [
        "for j in range(left, right):",
        f"    store_bits_float32(row, j, 1, load_bits_float32(row, j, 1) - 2 * ({differing}))",
        f"place += {count}",
    ]
    return ("\n" + 12 * " ").join(lines)


_ARRANGE = '''\
def arrange(table, span):
    """One line: the words at one place of a member's weights, of all outputs."""
    <names>
    member, place = span // places, span % places
    line = lines + 8 * outputs * span
    of = weights + 8 * outputs * places * member
    for j in range(outputs):
        store_bits_float64(line, j, 0, load_bits_float64(of, j * places + place, 1))
'''

_MULTIPLY = f'''\
def multiply(table, span):
    """A part of a member's rows, for a block of its outputs."""
    <names>
    block_number, rest = span % blocks, span // blocks
    part_number, member = rest % parts, rest // parts
    left, right = block * block_number, min(outputs, block * (block_number + 1))
    begin, end = part * part_number, min(samples * positions, part * (part_number + 1))
    of = lines + 8 * outputs * places * member
    for number in range(begin, end):
        sample, position = number // positions, number % positions
        kind = kinds + 8 * (2 + 2 * places) * word(kind_of, position)
        own = inputs + 8 * (input_words * (samples * member + sample) + word(first, position))
        row = results + 4 * outputs * (samples * positions * member + number)
        inside, place = word(kind, 0), 0
        for j in range(left, right):
            store_bits_float32(row, j, 1, word(kind, 1))
        while place + {TOGETHER} <= inside:
            <group>
        while place < inside:
            <one>
'''

_DRAW = f'''\
def draw(table, span):
    """A row of bits of one member: 1 where an element's random word is below its threshold."""
    <names>
    words_at = room({4 * (64 + _MADE)})
    member, row = span // rows, span % rows
    direction = member % directions
    flip = 0xFFFFFFFF if member >= directions else 0
    for number in range(words):
        first, inside = count * row + 64 * number, min(64, count - 64 * number)
        before, found = first % {_MADE}, 0
        for made in range((before + inside + {_MADE - 1}) // {_MADE}):
            make_words(words_at + {4 * _MADE} * made, table, direction, {BLOCKS} * (first // {_MADE} + made))
        own, limits = words_at + 4 * before, thresholds + 4 * first
        for at in range(inside):
            below = (load_bits_float32(own, at, 0) ^ flip) < load_bits_float32(limits, at, 1)
            found |= where(below, 1 << at, 0)
        store_bits_float64(results + 8 * words * span, number, 2, found)
'''

_SUM = '''\
def add(table, span):
    """Sums of some words, over all members in order: 64 of each."""
    <names>
    begin, end = part * span, min(total, part * (span + 1))
    for member in range(members):
        weight = number(weights, member)
        for at in range(begin, end):
            line, bits = sums + 512 * at, word(inputs, total * member + at)
            for j in range(64):
                store_float64(line, j, 0, load_float64(line, j, 0) + where((bits >> j) & 1 != 0, weight, 0.0))
'''


#: The words of bits in a span of a sum.
_PART = 8

#: With fewer instructions than this, waking threads costs more than they save.
_FEW = 1 << 16

Array = np.ndarray[Any, Any]


class CpuBinary(PackedBits):
    """The kernels for NumPy arrays."""

    def __init__(self) -> None:
        super().__init__(np)

    def _multiply(self, inputs: Array, weights: Array, results: Array, window: Window) -> None:
        plan = Plan.of(window)
        lines = np.empty(max(1, weights.size), np.uint64)
        arrays = (inputs, weights, lines, results, *plan.tables)
        table = np.array([*map(array_address, arrays), *plan.sizes], np.int64)
        assert len(table) == len(TABLE)
        _run("product", ARRANGE, plan.lines, table, weights.size)
        _run("product", MULTIPLY, plan.spans, table, results.size * weights[0, 0].size // 8)

    def _draw(self, thresholds: Array, results: Array, told: Mapping[str, int]) -> None:
        high = {"high": told["purpose"] << 16}
        table = _table(DRAW_TABLE, {"thresholds": thresholds, "results": results}, {**told, **high})
        _run("draw", 0, told["members"] * told["rows"], table, 64 * results.size)

    def _add(self, words: Array, weights: Array, sums: Array, told: Mapping[str, int]) -> None:
        part = max(1, min(_PART, -(-told["total"] // 8)))
        table = _table(SUM_TABLE, {"inputs": words, "weights": weights, "sums": sums}, {**told, "part": part})
        _run("sum", 0, -(-told["total"] // part), table, 8 * words.size)


def _table(names: Sequence[str], arrays: Mapping[str, Array], told: Mapping[str, int]) -> Array:
    """The table of a job: addresses and sizes by name, 0 for any name without one."""
    known = {**told, **{name: array_address(array) for name, array in arrays.items()}}
    return np.array([known.get(name, 0) for name in names], np.int64)


def _run(name: str, stage: int, spans: int, table: Array, work: int) -> None:
    """Runs a stage; `work` is an estimate of its instructions."""
    job = Job()
    job[cpu_threads.SPANS], job[cpu_threads.POINTERS], job[cpu_threads.STAGE] = spans, array_address(table), stage
    machine = _machine(name)
    if work < _FEW:
        machine.run(ctypes.addressof(job))
    else:
        cpu_threads.run(machine.run, machine.address, job)


_SOURCES = {"product": product_source, "draw": draw_source, "sum": sum_source}


@functools.cache
def _machine(name: str) -> ObjectCode:
    return loaded(f"binary_{name}", _SOURCES[name]())
