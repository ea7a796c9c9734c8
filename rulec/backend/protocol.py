"""The whole of what a backend must provide: three methods of a backend, one of a kernel, one of a call.

A backend turns a program into source text (pure), source text into a kernel (compiled and cached), and a kernel bound
to tensors into a call. The runtime owns everything else: buckets, the scalar table, scratch, the loop over stages, and
what is worked out between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from rulec.backend.layout import Layout
from rulec.compiler.ir import Program
from rulec.compiler.view import MatrixView


@dataclass(frozen=True)
class Rows:
    """The scalar table for one call.

    `table` is float64, C-contiguous, one row per distinct (group, t) and one column per scalar of the program;
    `index` is int64, the row of each tensor of the bucket (of every tensor bound, also where only some are fired).
    Late columns have their values from the stage on that names them.
    """

    table: np.ndarray[Any, np.dtype[np.float64]]
    index: np.ndarray[Any, np.dtype[np.int64]]


#: What a stage reads and writes beside parameters, gradients and states, by name; each has one array for each tensor
#: fired, in order. Scratch buffers and inputs are as the parameter, of the layout's dtype. Vectors, of the compute
#: dtype and C-contiguous, have as many elements as their axes: `batch*rows`, `batch*cols`, `batch`, or all of the
#: parameter's, then in its order in memory.
Scratch = Mapping[str, Sequence[Any]]


class Written(NamedTuple):
    """What a stage has done.

    `params` and `states` are those bound, where arrays are mutable, else new ones. `reduced` has the stage's reductions
    by name, in float64: an array of one number for each tensor fired, or, per row or column, a list of one array of
    shape `(batch, rows, 1)` or `(batch, 1, cols)` for each. An empty tensor gives 0 for a sum, and infinities for a
    minimum and a maximum.
    """

    params: Sequence[Any]
    states: Sequence[dict[str, Any]]
    reduced: Mapping[str, Any] = {}


class Call(Protocol):
    """A kernel bound to the parameters and states of one bucket."""

    def __call__(
        self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Runs one stage over the bucket, or over `tensors` of it (positions in the bucket) alone.

        `moving` are the gradients of the tensors fired, in order, each of its parameter's shape and the layout's
        dtype, contiguous. The bits of a result depend neither on the other tensors nor on the number of threads.
        """
        ...


class Kernel(Protocol):
    """A compiled program for one layout."""

    def bind(self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = ()) -> Call:
        """A call over these tensors: parameters, and for each its states of its shape by name, all contiguous.

        `views` say how the rule sees each of them as matrices; they may be left out where `is_shaped` says that no
        kernel of the program looks. Addresses are read here, once; the runtime binds again
        when they move.
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
        """The source text of the kernel, all its stages; pure, and imports no framework.

        Raises BackendUnsupported for an operation the backend has no way to print.
        """
        ...

    def build(self, program: Program, layout: Layout, source: str) -> Kernel:
        """The kernel of a source text, compiled or taken from the cache."""
        ...
