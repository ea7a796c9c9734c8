"""Binary layers on the CPU: products of packed bits in machine code, for all members and with several threads."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rulec.backend.binary import WORD_BITS, Bits, Counts, Window, words_of
from rulec.es.streams import BITS, DOMAIN
from rulec.kernel.bucket.address import array_address

from . import threads as cpu_threads
from .binary_draw import DRAW_TABLE, MARGIN, SUM_TABLE, draw_source, sum_source
from .binary_plan import TABLE, Plan
from .binary_source import ARRANGE, MULTIPLY, source
from .machine import Machine
from .threads import Job

#: How many words of bits are added up in a span.
_PART = 8

#: Below so many instructions, waking threads costs more than they save.
_FEW = 1 << 16

_WORD = 0xFFFFFFFF

Array = np.ndarray[Any, Any]


class CpuBinary:
    """The kernels for NumPy arrays."""

    def convolve(self, inputs: Array, weights: Array, window: Window) -> Array:
        """2*(equal bits) - (all bits), int32 of shape `window.shape`."""
        results = np.empty(window.shape, np.int32)
        if results.size:
            convolve_into(results, inputs, weights, window)
        return results

    def draw(self, thresholds: Array, shape: Sequence[int], bits: Bits) -> Array:
        """Words (members, *shape[:-1], words): 1 where an element's word is below its threshold."""
        count, rows = shape[-1], math.prod(shape[:-1])
        limits = np.zeros(thresholds.size + 2 * MARGIN, np.uint32)
        limits[MARGIN:-MARGIN] = thresholds.reshape(-1)
        results = np.empty((bits.members, *shape[:-1], words_of(count)), np.uint64)
        sizes = (rows, count, words_of(count), bits.directions)
        position = (bits.seed & _WORD, (bits.layer + DOMAIN) & _WORD, BITS, bits.step & _WORD)
        table = _table(DRAW_TABLE, (limits, results), (*sizes, *position))
        _run("draw", 0, bits.members * rows, table, 64 * results.size)
        return results

    def weighted_sum(self, words: Array, weights: Array, count: int) -> Array:
        """The sum over members of weight times bit, float64 (..., count)."""
        shape = words.shape[1:]
        sums = np.zeros((*shape, WORD_BITS))
        total = math.prod(shape)
        part = max(1, min(_PART, -(-total // 8)))
        table = _table(SUM_TABLE, (np.ascontiguousarray(words), weights, sums), (len(words), total, part))
        _run("sum", 0, -(-total // part), table, 8 * words.size)
        return sums.reshape(*shape[:-1], shape[-1] * WORD_BITS)[..., :count]


def convolve_into(results: Array, inputs: Array, weights: Array, window: Window) -> None:
    """The kernel's two stages over contiguous arrays."""
    plan = Plan.of(window)
    lines = np.empty(max(1, weights.size), np.uint64)
    table = _table(TABLE, (inputs, weights, lines, results, *plan.tables), plan.sizes)
    _run("product", ARRANGE, plan.lines, table, weights.size)
    _run("product", MULTIPLY, plan.spans, table, results.size * weights[0, 0].size // 8)


def _table(names: Sequence[str], arrays: Sequence[Array], sizes: Sequence[int]) -> Counts:
    """What a job points to."""
    found = np.array([*map(array_address, arrays), *sizes], np.int64)
    assert len(found) == len(names)
    return found


def _run(name: str, stage: int, spans: int, table: Counts, work: int) -> None:
    """Runs a stage; `work` is about how many instructions it has."""
    job = Job()
    job[cpu_threads.SPANS], job[cpu_threads.POINTERS], job[cpu_threads.STAGE] = spans, array_address(table), stage
    machine = _machine(name)
    if work < _FEW:
        machine.run(ctypes.addressof(job))
    else:
        cpu_threads.run(machine.run, machine.address, job)


_SOURCES = {"product": source, "draw": draw_source, "sum": sum_source}


@functools.cache
def _machine(name: str) -> Machine:
    from . import _machine as compiled

    return compiled(f"binary_{name}", _SOURCES[name]())
