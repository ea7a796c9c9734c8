"""Memory that a step is about to look at, asked for ahead.

A step looks at a few lines of memory of every parameter and gradient: the Python object, what torch keeps of the tensor
and of its storage. The last kernel has swept them from the caches, and one after the other each is a journey to main
memory. Asked for together they take as long as a few. An address that is not right any more costs nothing: nothing is
read, only fetched.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

_LINE = 64

#: Bytes that torch keeps of a tensor and of a storage, as far as a step looks.
_TENSOR, _STORAGE = 192, 64

#: Below this many tensors there is nothing to win.
FEW = 32

_PREFETCH = """
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)

define void @rulec_kernel(i64 %job) {
entry:
  %table = inttoptr i64 %job to ptr
  %count = load i64, ptr %table
  br label %test
test:
  %done = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp ult i64 %done, %count
  br i1 %more, label %body, label %end
body:
  %next = add i64 %done, 1
  %place = getelementptr i64, ptr %table, i64 %next
  %address = load i64, ptr %place
  %line = inttoptr i64 %address to ptr
  call void @llvm.prefetch.p0(ptr %line, i32 0, i32 3, i32 1)
  br label %test
end:
  ret void
}
"""


class Ahead:
    """The lines of memory of some tensors on the CPU, as they are now."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        lines = sorted({line for tensor in tensors for line in _lines(tensor)})
        self._job = np.array([len(lines), *lines], np.int64)
        self._at = self._job.ctypes.data
        self._machine = _machine()
        self._run = self._machine.run

    def ask(self) -> None:
        """Has them fetched; returns at once."""
        self._run(self._at)


def _lines(tensor: Tensor) -> Iterator[int]:
    for start, length in ((id(tensor), _LINE), (tensor._cdata, _TENSOR), (tensor.untyped_storage()._cdata, _STORAGE)):
        yield from range(start - start % _LINE, start + length, _LINE)


@functools.cache
def _machine() -> Any:
    """The compiled function; it takes the address of a count and that many addresses."""
    cpu_machine = importlib.import_module("rulec_backends.cpu.machine")
    return cpu_machine.Machine(cpu_machine.emit_object(_PREFETCH))
