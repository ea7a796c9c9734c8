"""Calls of cpu kernels bound to tensors: a fast one for a single stage of elements, and one for all other kernels.

Most steps are of one stage. The other call is for several stages, or a stage with vectors or inputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from rulec.backend.protocol import Numbers, ReplayableCall, Rows, Scratch, Written
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.kernel.multi_tensor.address import address_of, addresses_of, array_address, element_count
from rulec.kernel.multi_tensor.call import Finished, PlannedCall, Planner, Work
from rulec.kernel.multi_tensor.chunks import flat_chunks
from rulec.kernel.multi_tensor.slots import LineSlots, TensorSlots
from rulec.kernel.quantized import coded_arrays, coded_lines

from ..common import threads as cpu_threads
from ..common.threads import POLICY, Job
from .machine import ObjectCode


class OneStageCall:
    """A kernel of one stage bound to the parameters and states of one bucket. One thread at a time may call it."""

    def __init__(
        self, machine: ObjectCode, program: Program, layout: Layout, params: Sequence[Any],
        states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = (), flat: bool = False,
    ) -> None:  # fmt: skip
        self._machine = machine
        self._address = address_of(params)
        lines, sizes = coded_lines(program, layout), [element_count(p) for p in params]
        self._slots: dict[str, TensorSlots | LineSlots] = {}
        if program.elementwise:
            self._chunks = flat_chunks(sizes, POLICY)
        else:
            plan = Planner("cpu", program, layout, sizes, views, POLICY, flat)
            work, lines = plan.work(program.stages[0]), plan.lines
            self._chunks, self._slots = work.chunks, work.slots
        self._pointers = np.zeros((len(lines), len(params)), np.int64)
        for name, arrays in coded_arrays(program, layout, params, states).items():
            self._pointers[lines.index(name)] = [*map(self._address, arrays)]
        for name, slots in self._slots.items():
            self._pointers[lines.index(name)] = [*map(array_address, slots.arrays())]
        self._gradients = self._pointers[lines.index("g")]
        self._written = Written(params, states, Finished(self._slots, None))
        self._spans = self._chunks.spans(range(len(params)))
        self._tables = [array_address(t) for t in (self._spans, self._chunks.table, self._pointers)]

    def __call__(
        self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Updates every tensor of the bucket, or `tensors` of it, in place; returns the bound params and states.

        Reductions are memory of the kernel: they are valid until the tensor's next update.
        """
        if tensors is None:
            self._gradients[:] = addresses_of(moving, self._address)
            self.launch(self._job(rows, len(self._spans), self._tables[0]))
            return self._written
        self._gradients[list(tensors)] = addresses_of(moving, self._address)
        spans = self._chunks.spans(tensors)
        self.launch(self._job(rows, len(spans), array_address(spans)))
        if not self._slots:
            return self._written
        return self._written._replace(reduced=Finished(self._slots, tuple(tensors)))

    def launch(self, job: ctypes.Array[ctypes.c_int64]) -> None:
        """Runs the kernel on a job, to its end."""
        cpu_threads.run(self._machine.run, self._machine.address, job)

    def standing(self, rows: Rows) -> ReplayableCall:
        """The call over all tensors, to be run again with other rows and gradients."""
        return standing_job(self._machine, self._job(rows, len(self._spans), self._tables[0]), self._gradients)

    def _job(self, rows: Rows, spans: int, spans_at: int) -> ctypes.Array[ctypes.c_int64]:
        job = Job()
        job[cpu_threads.SPANS :] = [
            spans, spans_at, *self._tables[1:],
            len(self._gradients), array_address(rows.index), array_address(rows.table), 0,
        ]  # fmt: skip
        return job


def standing_job(
    machine: ObjectCode, job: ctypes.Array[ctypes.c_int64], gradients: np.ndarray[Any, Any]
) -> ReplayableCall:
    """A job of a kernel to be run again; `gradients` are the addresses of gradients in its table."""
    at, first = ctypes.addressof(job), array_address(gradients)
    run, renew = partial(_run, machine, job), partial(_renew, job)
    return ReplayableCall(run, renew, at + 8 * cpu_threads.NEXT_SPAN, at + 8 * cpu_threads.ROWS, first, is_exact=True)


def _run(machine: ObjectCode, job: ctypes.Array[ctypes.c_int64]) -> None:
    """Runs a kernel on a job, to its end."""
    cpu_threads.run(machine.run, machine.address, job)


def _renew(job: ctypes.Array[ctypes.c_int64], ahead: Numbers) -> None:
    """Has a job's rows stand before these."""
    job[cpu_threads.ROWS] = array_address(ahead) - ahead.strides[0]


class StagedCall(PlannedCall):
    """A kernel of the cpu backend bound to the parameters and states of one bucket."""

    backend = "cpu"

    def __init__(
        self, machine: ObjectCode, program: Program, layout: Layout, params: Sequence[Any],
        states: Sequence[dict[str, Any]], views: Sequence[MatrixView], flat: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(program, layout, params, states, views, POLICY, flat)
        self._machine, self._pointers_at = machine, array_address(self._pointers)

    def _launch(self, work: Work, stage: int, rows: Rows, fired: tuple[int, ...] | None) -> None:
        cpu_threads.run(self._machine.run, self._machine.address, self._job(work, stage, rows, fired))

    def standing(self, rows: Rows) -> ReplayableCall:
        """The call of the only stage over all tensors, to be run again with other rows and gradients."""
        (work,) = self._works
        assert work is not None
        return standing_job(self._machine, self._job(work, 0, rows, None), self._gradients)

    def _job(
        self, work: Work, stage: int, rows: Rows, fired: tuple[int, ...] | None
    ) -> ctypes.Array[ctypes.c_int64]:  # fmt: skip
        spans, job = work.spans_of(fired), Job()
        job[cpu_threads.SPANS :] = [
            len(spans), array_address(spans), work.chunks.at, self._pointers_at,
            len(self._everything), array_address(rows.index), array_address(rows.table), stage,
        ]  # fmt: skip
        return job
