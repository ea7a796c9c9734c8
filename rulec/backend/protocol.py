"""The whole interface of a backend: three methods of a backend, one of a kernel, one of a call.

A backend turns a program into source text (pure), source text into a kernel (compiled and cached), and a kernel bound
to tensors into a call. The runtime owns everything else: buckets, the scalar table, scratch, the loop over stages, and
the computations between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView

Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Rows:
    """The scalar table for one call.

    `table` is float64, C-contiguous, one row per distinct (group, t) and one column per scalar of the program;
    `index` is int64, the row of each tensor of the bucket (of every tensor bound, also where only some are fired).
    Late columns have their values from the stage with their numbers in its `columns` on.

    For a backend that works on the device (`on_device`), the table is NumPy's where all of it is known before the
    step, else an array of the tensors' kind, on their device; `index` is NumPy's. Only such a backend gets the other
    two, each an array on the device or None. `stays` is boolean, one for each row: true for tensors to be left as they
    are. `scale` is a float32 array of one element, the factor in the gradients: the kernel multiplies gradients by its
    reciprocal as it loads them.
    """

    table: Any
    index: np.ndarray[Any, np.dtype[np.int64]]
    stays: Any = None
    scale: Any = None


#: The scratch buffers, inputs and vectors of a stage, by name: one array for each tensor fired, in order. Scratch
#: buffers and inputs have the parameter's shape and the layout's dtype. Vectors are of the compute dtype, C-contiguous,
#: with as many elements as their axes: `batch*rows`, `batch*cols`, `batch`, or all of the parameter's, in its order in
#: memory. Where arrays cannot be written, new arrays take the places of scratch buffers in these sequences.
Scratch = Mapping[str, Sequence[Any]]


class Written(NamedTuple):
    """The results of a stage.

    `params` and `states` are the bound arrays where these are mutable, else new ones. `reduced` has the stage's
    reductions by name, in float64: an array of one number for each tensor fired, or, per row or column, a list of one
    array of shape `(batch, rows, 1)` or `(batch, 1, cols)` for each. An empty tensor gives 0 for a sum, and infinities
    for a minimum and a maximum. Reductions are NumPy's, or arrays of the tensors' kind for a backend that works on the
    device, and they are valid until the stage runs again.
    """

    params: Sequence[Any]
    states: Sequence[dict[str, Any]]
    reduced: Mapping[str, Any] = {}


class ReplayableCall(NamedTuple):
    """A call over all tensors of a bucket that can be replayed.

    Before each `run` the words at these addresses are written: `next` is set to zero, last of all; `table` gets the
    address of rows of the scalar table, among the rows of `renew`. The address of the first gradient goes to
    `gradients`, that of each further one `stride` bytes behind the one before it. If `is_exact`, the word `next` is
    zero until the kernel begins, and no interrupt comes into it from then to its end. `renew` takes the rows of the
    steps that follow, and has `table` stand before the first of them; its caller keeps them. It comes before all runs.
    """

    run: Callable[[], None]
    renew: Callable[[Numbers], None]
    next: int
    table: int
    gradients: int
    stride: int = 8
    is_exact: bool = False


#: The earlier name, by which backends of other packages import the class.
Standing = ReplayableCall


class Call(Protocol):
    """A kernel bound to the parameters and states of one bucket."""

    def __call__(
        self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Runs one stage over the bucket, or over only `tensors` of it (positions in the bucket).

        `moving` are the gradients of the tensors fired, in order, each of its parameter's shape and the layout's
        dtype, contiguous. The bits of a result depend neither on the other tensors nor on the number of threads.
        """
        ...


class Kernel(Protocol):
    """A compiled program for one layout."""

    def bind(self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = ()) -> Call:
        """A call over these tensors: parameters, and for each its states of its shape by name, all contiguous.

        `views` are the matrix views of the parameters; they may be left out for a program that is not `is_shaped`.
        Addresses are read here, once; the runtime binds again when they move.
        """
        ...


class ScalarCall(Call, Protocol):
    """A call that evaluates its program's scalar program on the device, in one launch."""

    def scalars(self, known: Scalars) -> tuple[Any, dict[str, Any]]:
        """The table, a row for each tensor of the bucket in order, and the new values of the scalar states.

        The table is float64, on the device, with all columns of the program, the late ones zero. New values are
        float64, one for each tensor of the bucket. Nothing of `known` is written.
        """
        ...


@dataclass(frozen=True)
class Scalars:
    """The inputs of a scalar program, as arrays on the device.

    `counts` (float32 or float64) are the updates of each tensor of the bucket so far: its `t` is one more. `groups`
    (int64) are the tensors' groups. `hyper` is float64, C-contiguous, a line of one number per group for each of the
    program's hyper-parameters, in order (`program.hyper`). `facts` has a float64 array over tensors for each shape fact
    in the scalar program. `states` has the states that are numbers, by name, in float64: over tensors, over groups, or
    a single one, by the buffer's axes. `levels` has the `t` of states of groups (`"group"`, one per group) and of the
    model (`"model"`, a single one), in float64, for this step.
    """

    counts: Any
    groups: Any
    hyper: Any
    facts: Mapping[str, Any]
    states: Mapping[str, Any]
    levels: Mapping[str, Any]


@runtime_checkable
class Backend(Protocol):
    """A way to run programs, such as C on the CPU or Triton on a GPU.

    A backend may set `on_device = True`: the values between its stages then stay on the tensors' device, and nothing
    waits for the device. Rows, vectors and reductions are arrays of the tensors' own kind (see `Rows` and `Written`);
    without it they are NumPy's. With `narrow = True` its kernels read and write operands and results of
    `newton_schulz` in 16 bits, as the function rounds them (see `Layout.results`).
    """

    name: str

    def unavailable_reason(self) -> str | None:
        """None where usable here, else one line with the missing part and the package to install."""
        ...

    def emit(self, program: Program, layout: Layout) -> str:
        """The source text of the kernel, all its stages; pure, and imports no framework.

        Raises BackendUnsupported for an operation outside the backend.
        """
        ...

    def build(self, program: Program, layout: Layout, source: str) -> Kernel:
        """The kernel of a source text, compiled or taken from the cache."""
        ...
