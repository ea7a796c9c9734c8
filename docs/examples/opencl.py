"""A backend for OpenCL: NumPy's arrays, on any device that computes in float64.

The C of a stage is rulec's own: this file says what OpenCL writes otherwise, and launches kernels. An OpenCL kernel has
no addresses to look up in a table, so each tensor has a launch of its own, with its arrays as arguments; a work item
takes one chunk.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rulec.backend.protocol import Rows, Scratch
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.errors import BackendUnavailable, TensorError
from rulec.kernel.multi_tensor.call import BucketCall, Planner, Work
from rulec.kernel.multi_tensor.chunks import Policy
from rulec.kernel.nest import written
from rulec.kernel.place import address_lines, bound_arrays
from rulec_backends.common.text import about, about_stage
from rulec_backends.cstyle.dialect import Dialect, call_lines, comment, indented
from rulec_backends.cstyle.loops import LOCALS, ChunkLoops, chunk_type, helpers
from rulec_backends.cstyle.words import WORDS as C_WORDS

#: IEEE arithmetic: every operation is rounded as the text has it.
OPTIONS = ["-cl-std=CL1.2", "-cl-fp32-correctly-rounded-divide-sqrt"]

#: How tensors are cut: into chunks as long as a work item may take one. Nobody here takes several at once.
POLICY = Policy(spans=lambda: 1, chunk=4096, widest=1024, least_rows=16)

#: Functions that are called with an `f` for float in C, and without in OpenCL.
FUNCTIONS = (
    "sqrt", "cbrt", "hypot", "exp", "expm1", "log", "log1p", "pow", "tanh", "erf", "floor", "fabs", "fmod", "copysign",
)  # fmt: skip

#: OpenCL's own `sign` takes NaN for 0.
PRELUDE = """\
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#pragma OPENCL FP_CONTRACT OFF
typedef long int64_t;
typedef uint uint32_t;
typedef ushort uint16_t;
#undef sign
#define sign sign_of
"""

#: The words of OpenCL that are none of C.
RESERVED = """
    kernel global local constant private read_only write_only read_write half uchar ushort uint ulong event_t sampler_t
    image2d_t as_float as_uint get_global_id chunks table row_of chunk sign_of
"""

_INLINE = "static inline"
#: Conversions in OpenCL's words; `half` is a type.
WORDS = {
    "float_of": f"{_INLINE} float float_of(uint32_t bits)\n{{\n    return as_float(bits);\n}}\n",
    "bits_of": f"{_INLINE} uint32_t bits_of(float value)\n{{\n    return as_uint(value);\n}}\n",
    "from_float16": C_WORDS["from_float16"].replace("FUNCTION", _INLINE).replace("half", "from"),
}

OPENCL = Dialect(
    "opencl", _INLINE, WORDS,
    LOCALS | {*RESERVED.split()} | {f"{t}{n}" for t in ("float", "double", "int", "uint") for n in (2, 3, 4, 8, 16)},
    memory="global ",
)  # fmt: skip


class OpenclStage(ChunkLoops):
    """A kernel for one stage: its arguments are the arrays of one tensor, and a work item takes one chunk."""

    dialect = OPENCL

    def __init__(self, program: Program, layout: Layout, index: int) -> None:
        super().__init__(program, layout, index, kernel_name(index))
        #: The arrays that the kernel is given, in order: buffers, vectors and slots of reductions.
        self.arrays = [name for name in address_lines(program) if self.pointer(name)]

    def text(self) -> str:
        """The function of an element, and the kernel."""
        arguments = ["global const Chunk *chunks", "global const double *table", "int64_t row_of"]
        arrays = [f"{self.pointer(name)}{self._argument(name)}" for name in self.arrays]
        head = call_lines(f"kernel void {self.name}", [arguments, arrays], "")
        row = f"global const double *row = table + {len(self.program.columns)} * row_of;"
        body = [
            "const int64_t chunk = get_global_id(0);",
            "global const Chunk *at = &chunks[chunk];",
            *self._slot_lines(), *self.scalar_lines(row), "", *written(self.nest.levels(), self),
        ]  # fmt: skip
        about_it = "\n".join(comment(about_stage(self.program, self.index)))
        return "\n".join([about_it, self.write.text(), *head, "{", *indented(body), "}", ""])

    def _argument(self, name: str) -> str:
        return f"{self.write.names[name]}_slots" if self.slots_of(name) else self.write.at[name]

    def _slot_lines(self) -> list[str]:
        """Where the totals of a chunk's rows and columns begin."""
        return [
            f"global double *{self.write.at[name]} = {self._argument(name)} + at->{self.slots_of(name)};"
            for name in self.arrays if self.slots_of(name)
        ]  # fmt: skip


def kernel_name(index: int) -> str:
    """The kernel of a stage."""
    return f"stage_{index}"


def source_text(program: Program, layout: Layout) -> str:
    """The whole source. BackendUnsupported for an operation that C has no spelling for."""
    stages = [OpenclStage(program, layout, i) for i, stage in enumerate(program.stages) if stage.roots]
    code = "\n".join(stage.text() for stage in stages)
    words = "\n".join([chunk_type(program, layout), *helpers(code, OPENCL)])
    names = [f"#define {f}f {f}" for f in FUNCTIONS if re.search(rf"\b{f}f\(", words + code)]
    head = "\n".join(comment([f"OpenCL C for {layout.text()}. Printed by rulec.", "", *about(program)]))
    return "\n".join([head + "\n", PRELUDE + "".join(f"{name}\n" for name in names), words, code])


class OpenclBackend:
    """Kernels in OpenCL C, for NumPy's arrays, on the first device that has float64."""

    name = "opencl"

    def unavailable_reason(self) -> str | None:
        """None where there is a device, else what is missing."""
        if importlib.util.find_spec("pyopencl") is None:
            return "pyopencl is not installed: pip install pyopencl pocl-binary-distribution"
        return None if _devices() else "OpenCL finds no device with float64: install a driver, such as PoCL's"

    def emit(self, program: Program, layout: Layout) -> str:
        """A source with a kernel for each stage."""
        return source_text(program, layout)

    def build(self, program: Program, layout: Layout, source: str) -> OpenclKernel:
        """The kernels of a source text, compiled by the driver. BackendUnavailable where it fails."""
        return OpenclKernel(program, layout, _built(source))


@functools.cache
def _devices() -> list[Any]:
    import pyopencl as cl

    try:
        platforms = cl.get_platforms()
    except cl.LogicError:  # there is no driver at all
        return []
    return [d for p in platforms for d in p.get_devices() if d.double_fp_config]


@functools.cache
def _queue() -> Any:
    import pyopencl as cl

    return cl.CommandQueue(cl.Context(_devices()[:1]))


@functools.lru_cache(maxsize=1024)
def _built(source: str) -> Any:
    import pyopencl as cl

    try:
        return cl.Program(_queue().context, source).build(options=OPTIONS)
    except cl.RuntimeError as error:
        first = next((line for line in str(error).splitlines() if "error:" in line), str(error).splitlines()[0])
        raise BackendUnavailable(
            f"the OpenCL driver cannot compile a kernel ({first.strip()}): use another backend"
        ) from error


class OpenclKernel:
    """The kernels of one program and layout."""

    def __init__(self, program: Program, layout: Layout, library: Any) -> None:
        self.program, self.layout, self.library = program, layout, library

    def bind(
        self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = ()
    ) -> OpenclCall:
        """A call over these arrays of NumPy, contiguous, of the layout's dtypes. TensorError for others."""
        return OpenclCall(self, params, states, views)


class OpenclCall(BucketCall["Launch"]):
    """Kernels bound to the parameters and states of one bucket."""

    backend = "opencl"

    def __init__(
        self, kernel: OpenclKernel, params: Sequence[Any], states: Sequence[dict[str, Any]],
        views: Sequence[MatrixView],
    ) -> None:  # fmt: skip
        super().__init__(params, states)
        program, layout = kernel.program, kernel.layout
        self._bound = bound_arrays(program, params, states)
        plan = Planner(self.backend, program, layout, [p.size for p in params], views, POLICY)
        self._works = [
            Launch(kernel, index, plan.work(stage)) if stage.roots else None
            for index, stage in enumerate(program.stages)
        ]  # fmt: skip

    def _run(
        self, work: Launch, stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch,
        fired: tuple[int, ...] | None, stream: Any,
    ) -> Mapping[str, Any]:  # fmt: skip
        positions = self._everything if fired is None else fired
        bound = {name: [arrays[i] for i in positions] for name, arrays in self._bound.items()}
        coming = {line.name: line.take(scratch, positions) for line in work.work.moving}
        work.run({**bound, **coming, "g": moving}, rows, positions)
        return {name: slots.finished(fired) for name, slots in work.work.slots.items()}


class Launch:
    """One stage over the tensors of a bucket, with a launch for each."""

    def __init__(self, kernel: OpenclKernel, index: int, work: Work) -> None:
        import pyopencl as cl

        stage = OpenclStage(kernel.program, kernel.layout, index)
        self.work, self._arrays = work, stage.arrays
        self._kernel = cl.Kernel(kernel.library, kernel_name(index))
        self._slots = {name: slots.arrays() for name, slots in work.slots.items()}
        self._written = {*stage.nest.stored, *self._slots}
        self._chunks = _Shared(work.chunks.table)

    def run(self, arrays: Mapping[str, Sequence[Any]], rows: Rows, fired: Sequence[int]) -> None:
        """Launches the kernel for each tensor, and waits: then what was written is in the arrays."""
        table = _Shared(np.ascontiguousarray(rows.table, np.float64))
        shared = []
        for position, tensor in enumerate(fired):
            first, last = self.work.chunks.first[tensor : tensor + 2]
            if first == last:
                continue
            given = [
                _Shared(self._slots[name][tensor] if name in self._slots else arrays[name][position])
                for name in self._arrays
            ]
            buffers = [x.buffer for x in (self._chunks, table)], [x.buffer for x in given]
            row = np.int64(rows.index[tensor])
            self._kernel(_queue(), (last - first,), None, *buffers[0], row, *buffers[1], global_offset=(first,))
            shared += [x for name, x in zip(self._arrays, given, strict=True) if name in self._written]
        for each in shared:
            each.fetch()
        _queue().finish()


class _Shared:
    """An array that a kernel works on where it lies, or in a copy that `fetch` brings back."""

    def __init__(self, array: Any) -> None:
        import pyopencl as cl

        if not isinstance(array, np.ndarray) or not array.flags.forc:
            raise TensorError("the opencl backend takes contiguous NumPy arrays: pass numpy.ascontiguousarray of it")
        self._bytes = array.reshape(-1, order="A").view(np.uint8)
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR
        self.buffer = cl.Buffer(_queue().context, flags, hostbuf=self._bytes) if array.size else None

    def fetch(self) -> None:
        """Brings what kernels wrote into the array."""
        import pyopencl as cl

        mapped, _ = cl.enqueue_map_buffer(
            _queue(), self.buffer, cl.map_flags.READ, 0, self._bytes.shape, np.uint8, is_blocking=False
        )
        mapped.base.release(_queue())
