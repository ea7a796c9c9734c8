"""The whole of what a backend must provide: three methods of a backend, one of a kernel, one of a call.

A backend turns a program into source text (pure), source text into a kernel (compiled and cached), and a kernel bound
to tensors into a call. The runtime owns everything else: buckets, the scalar table, scratch, the loop over stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rulec.backend.layout import Layout
from rulec.compiler.ir import Program


@dataclass(frozen=True)
class Rows:
    """The scalar table for one call.

    `table` is float64, C-contiguous, one row per distinct (group, t) and one column per scalar of the program;
    `index` is int64, the row of each tensor of the bucket (of every tensor bound, also where only some are fired).
    """

    table: np.ndarray[Any, np.dtype[np.float64]]
    index: np.ndarray[Any, np.dtype[np.int64]]


class Call(Protocol):
    """A kernel bound to the parameters and states of one bucket."""

    def __call__(
        self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Any = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Runs one stage over the bucket, or over `tensors` of it (positions in the bucket) alone.

        `moving` are the gradients of the tensors fired, in order, each of its parameter's shape and the layout's
        dtype, contiguous. Returns what was written: the same objects where arrays are mutable, else new
        `(params, states)` as they were bound.
        """
        ...


class Kernel(Protocol):
    """A compiled program for one layout."""

    def bind(self, params: Sequence[Any], states: Sequence[dict[str, Any]]) -> Call:
        """A call over these tensors: parameters, and for each its states by name, all contiguous and of its shape.

        Addresses are read here, once; the runtime binds again when they move.
        """
        ...


@runtime_checkable
class Backend(Protocol):
    """One way to run programs."""

    name: str

    def unavailable_reason(self) -> str | None:
        """None where usable here, else one line: what is missing and what to install."""
        ...

    def emit(self, program: Program, layout: Layout) -> str:
        """The source text of the kernel; pure, and imports no framework.

        Raises BackendUnsupported for an operation the backend has no way to print.
        """
        ...

    def build(self, program: Program, layout: Layout, source: str) -> Kernel:
        """The kernel of a source text, compiled or taken from the cache."""
        ...
