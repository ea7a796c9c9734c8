"""A kernel bound to tensors: of several stages, or of a stage with reductions, vectors or inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rulec.backend.protocol import Rows
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.kernel.multi_tensor.address import array_address
from rulec.kernel.multi_tensor.call import PlannedCall
from rulec.kernel.multi_tensor.work import Work

from ..common import threads as cpu_threads
from ..common.threads import POLICY, Job
from .machine import Machine


class StagedCall(PlannedCall):
    """A kernel of the cpu backend bound to the parameters and states of one bucket."""

    backend = "cpu"

    def __init__(
        self, machine: Machine, program: Program, layout: Layout, params: Sequence[Any],
        states: Sequence[dict[str, Any]], views: Sequence[MatrixView], flat: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(program, layout, params, states, views, POLICY, flat)
        self._machine, self._pointers_at = machine, array_address(self._pointers)

    def _launch(self, work: Work, stage: int, rows: Rows, fired: tuple[int, ...] | None) -> None:
        spans = work.spans_of(fired)
        job = Job()
        job[cpu_threads.SPANS :] = [
            len(spans), array_address(spans), work.chunks.at, self._pointers_at,
            len(self._everything), array_address(rows.index), array_address(rows.table), stage,
        ]  # fmt: skip
        cpu_threads.run(self._machine.run, self._machine.address, job)
