"""Binary layers on the CPU: products of packed bits in machine code, for all members and with several threads."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rulec.backend.binary import Window
from rulec.kernel.multi_tensor.address import array_address

from ..common import threads as cpu_threads
from ..common.binary import PackedBits
from ..common.binary_plan import TABLE, Plan
from ..common.threads import Job
from .binary_source import ARRANGE, DRAW_TABLE, MULTIPLY, SUM_TABLE, draw_source, product_source, sum_source
from .machine import Machine, loaded

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
def _machine(name: str) -> Machine:
    return loaded(f"binary_{name}", _SOURCES[name]())
