"""A library bound to the tensors of one bucket."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from rulec.backend.protocol import Rows, Scratch, Written
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.kernel.multi_tensor.address import array_address
from rulec.kernel.multi_tensor.call import PlannedCall
from rulec.kernel.multi_tensor.work import Work

from ..common.threads import POLICY
from . import threads as c_threads
from .arrays import require_memory
from .source import BUCKET, stage_name


class CCall(PlannedCall):
    """A library bound to parameters and states. One thread at a time may call it.

    A stage has the same chunks, slots for reductions and addresses as in the cpu backend; only the launch differs.
    """

    backend = "c"

    def __init__(
        self, library: ctypes.CDLL, program: Program, layout: Layout, params: Sequence[Any],
        states: Sequence[dict[str, Any]], views: Sequence[MatrixView],
    ) -> None:  # fmt: skip
        require_memory("p", params)
        for name in states[0] if states else ():
            require_memory(name, [state[name] for state in states])
        super().__init__(program, layout, params, states, views, POLICY)
        self._stages = {
            i: getattr(library, stage_name(program, i)) for i, stage in enumerate(program.stages) if stage.roots
        }
        line_bytes = self._pointers.strides[0]
        first = array_address(self._pointers)
        self._bucket = (ctypes.c_int64 * (len(BUCKET) + len(self._pointers)))()
        self._bucket[len(BUCKET) :] = [first + line * line_bytes for line in range(len(self._pointers))]

    def __call__(
        self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Runs a stage over every tensor of the bucket, or `tensors` of it, in place; see `PlannedCall`.

        TensorError for an array that is not contiguous memory of this machine, before anything is written.
        """
        require_memory("g", moving)
        for name, arrays in (scratch or {}).items():
            require_memory(name, arrays)
        return super().__call__(stage, moving, rows, scratch, tensors=tensors, stream=stream)

    def _launch(self, work: Work, stage: int, rows: Rows, fired: tuple[int, ...] | None) -> None:
        spans = work.spans_of(fired)
        self._bucket[: len(BUCKET)] = [
            c_threads.threads(len(spans)), len(self._everything), len(spans), array_address(spans),
            work.chunks.at, array_address(rows.index), array_address(rows.table),
        ]  # fmt: skip
        self._stages[stage](self._bucket)
