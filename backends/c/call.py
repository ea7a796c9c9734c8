"""Calls of a C library bound to the tensors of one bucket, with checks of arrays and the number of threads.

Elements must follow one another from an address in main memory. OpenMP wakes the threads of a stage, waits for all of
them, and loses them in a fork.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from rulec.backend.protocol import Rows, Scratch, Written
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.errors import TensorError
from rulec.kernel.multi_tensor.address import array_address
from rulec.kernel.multi_tensor.call import PlannedCall, Work

from ..common import threads as cpu_threads
from ..common.threads import POLICY
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
            threads(len(spans)), len(self._everything), len(spans), array_address(spans),
            work.chunks.at, array_address(rows.index), array_address(rows.table),
        ]  # fmt: skip
        self._stages[stage](self._bucket)


def require_memory(name: str, arrays: Sequence[Any]) -> None:
    """TensorError unless all these NumPy arrays or PyTorch tensors are dense in main memory.

    `name` is the buffer's, for the message.
    """
    for index, array in enumerate(arrays):
        fault = _fault(array)
        if fault:
            raise TensorError(f"{name} of tensor {index} {fault}")


def _fault(array: Any) -> str:
    """The fault of an array and its remedy, in words; empty for a good array."""
    if isinstance(array, np.ndarray):
        if not array.flags.aligned:
            return "does not begin at a multiple of its elements' size: copy it"
        return "" if array.flags.forc or _is_dense(array.shape, _steps(array)) else _SCATTERED
    if not hasattr(array, "data_ptr"):
        return f"is of type {type(array).__name__}: the c backend takes NumPy arrays and PyTorch tensors"
    if array.device.type != "cpu":
        return f"is on {array.device}, and the c backend works in main memory: choose the backend of that device"
    return "" if array.is_contiguous() or _is_dense(array.shape, array.stride()) else _SCATTERED


_SCATTERED = "is not contiguous: make it so"


def _steps(array: np.ndarray[Any, Any]) -> list[int]:
    """The strides of an array in elements. A stride of no whole number is 0 here, as in no dense array."""
    return [step // array.itemsize if step % array.itemsize == 0 else 0 for step in array.strides]


def _is_dense(shape: Sequence[int], steps: Sequence[int]) -> bool:
    """Whether elements lie one after the other, in any order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(steps, shape, strict=True) if size != 1):
        if step != expected:
            return 0 in shape
        expected *= size
    return True


#: With fewer spans of work than this, a second thread costs more than it saves.
FEW_SPANS = 8

_FORKED: list[int] = []


def threads(spans: int) -> int:
    """The number of threads for this many spans of work."""
    return most() if spans >= FEW_SPANS else 1


def most() -> int:
    """RULEC_NUM_THREADS, else the number of this process's processors; one in a forked child.

    In a child, GNU's OpenMP would wait for threads that exist only in the parent.
    """
    return 1 if _FORKED else cpu_threads.thread_count()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _FORKED.append(os.getpid()))
