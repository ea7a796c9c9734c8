"""The cupy backend: CUDA C, compiled by NVRTC through CuPy, over CuPy arrays and PyTorch's CUDA tensors.

One launch runs a stage over all tensors of a bucket. A block takes a chunk of one tensor, and finds its addresses in
tables on the device. Elements move 16 bytes at a time where addresses allow it. Nothing waits for the device.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from rulec.backend.capabilities import Noise
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView

from ..common.noise import fill
from .binary import CupyBinary
from .binary import source as binary_source
from .call import CudaCall
from .coded import decodes
from .memory import Functions, Modules, first_line, memory_of, modules_of, used
from .noise import CudaNoiseCall, estimate_source, shared_ring
from .plan import THREADS
from .print import kernel_source


class CupyBackend:
    """Kernels in CUDA C, for CuPy arrays and PyTorch tensors on NVIDIA's GPUs; `threads` in a block."""

    name = "cupy"
    on_device = True

    def __init__(self, threads: int = THREADS) -> None:
        self.threads = threads

    def unavailable_reason(self) -> str | None:
        """None with a usable GPU; else the missing part, in words."""
        if importlib.util.find_spec("cupy") is None:
            return "cupy is not installed: pip install cupy-cuda13x, or the wheel for your CUDA, such as cupy-cuda12x"
        try:
            import cupy

            if cupy.cuda.runtime.is_hip:
                return "CuPy is here for AMD's GPUs, and these kernels are for NVIDIA's: use backend 'triton'"
            count = cupy.cuda.runtime.getDeviceCount()
        except Exception as error:  # noqa: BLE001 - whatever CuPy finds wrong with a driver or a library
            return f"CuPy finds no GPU ({first_line(error)}): install NVIDIA's driver, or use another backend"
        return None if count else "CuPy finds no GPU: install NVIDIA's driver, or use another backend"

    def emit(self, program: Program, layout: Layout) -> str:
        """The source of the kernels: one for each stage, one that finishes reductions, one for the scalar program."""
        return kernel_source(program, layout)

    def decodes(self, program: Program, layout: Layout) -> bool:
        """Whether the kernels read and write states in codes: where no such stage sees rows or columns."""
        return decodes(program, layout, self.threads)

    def build(self, program: Program, layout: Layout, source: str) -> CupyKernel:
        """The kernel of a source text, compiled for a device at the first `bind` there."""
        return CupyKernel(program, layout, modules_of(source), self.threads)

    def binary(self) -> CupyBinary:
        """The kernels of binary layers, for CuPy's arrays."""
        return CupyBinary(modules_of(binary_source()))

    def emit_estimate(self, program: Program, layout: Layout, values: str) -> str:
        """The source of a kernel with a sum of noise of the kind `values` for its gradient."""
        return estimate_source(program, layout, values)

    def build_estimate(self, program: Program, layout: Layout, values: str, source: str) -> CupyEstimate:
        """The kernel of a source text of `emit_estimate`."""
        return CupyEstimate(program, layout, modules_of(source), self.threads)

    def fill_noise(self, out: Any, noise: Noise, offset: int = 0) -> None:
        """Writes elements `offset` and on of noise, in the current stream, into a contiguous array on a GPU."""
        fill(self, out, noise, offset, once=True)


class CupyKernel:
    """The kernels of one program and layout."""

    def __init__(self, program: Program, layout: Layout, modules: Modules, threads: int) -> None:
        self.program, self.layout, self.modules, self.threads = program, layout, modules, threads

    def bind(
        self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = ()
    ) -> CudaCall:
        """A call over these tensors: contiguous, of the layout's dtypes, all on one GPU. Their addresses are read now.

        TensorError for arrays in other memory, BackendUnavailable where the GPU is too old or NVRTC fails.
        """
        memory = memory_of(params, f"the parameters of {self.program.name}")
        with used(memory):
            functions = self.modules.functions(self.program.name, memory.device)

        def narrow() -> Functions:
            source = kernel_source(self.program, self.layout, narrow=True)
            return modules_of(source).functions(self.program.name, memory.device)

        return CudaCall(
            self.program, self.layout, functions, self.threads, memory, params, states, views, narrow=narrow
        )  # fmt: skip


class CupyEstimate(CupyKernel):
    """The kernels of a program with noise in place of gradients."""

    def bind(
        self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = (),
        offset: int = 0, once: bool = False,
    ) -> CudaNoiseCall:  # fmt: skip
        """A call with Noise for gradients. Each tensor begins at element `offset` of its noise, a multiple of 128.

        With `once`, `bind` does not wait for the device, and only the current stream may run the call.
        """
        memory = memory_of(params, f"the parameters of {self.program.name}")
        with used(memory):
            functions = self.modules.functions(self.program.name, memory.device)
        ring = shared_ring(memory.device) if once else None
        return CudaNoiseCall(self.program, self.layout, functions, self.threads, memory, params, states, offset, ring)
