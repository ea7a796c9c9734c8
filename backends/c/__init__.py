"""The c backend: readable C99 with OpenMP, compiled by the system's compiler, for NumPy arrays and PyTorch CPU tensors.

The function of an element has the same text in CUDA C.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rulec.backend.capabilities import Noise
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.kernel.quantized import is_flat

from ..common.noise import NoiseKernel, fill
from .compile import assembly, library, missing
from .noise import estimate_source
from .source import source

if TYPE_CHECKING:
    from rulec.backend.capabilities import BinaryKernels

    from .call import CCall


class CBackend:
    """Kernels in C99, for NumPy arrays and PyTorch tensors on the CPU."""

    name = "c"

    def unavailable_reason(self) -> str | None:
        """None with a C compiler on this machine, else one sentence with the remedy."""
        return missing()

    def emit(self, program: Program, layout: Layout) -> str:
        """A source with the functions of all stages. BackendUnsupported for an operation without a spelling in C."""
        return source(program, layout)

    def build(self, program: Program, layout: Layout, source: str) -> CKernel:
        """The kernel of a source text: from the cache, or compiled into it."""
        return CKernel(program, layout, library(program.name, source))

    def assembly(self, name: str, source: str) -> str:
        """The machine code of a printed kernel, as a text for an assembler: see `rulec.backend.capabilities`."""
        return assembly(name, source)

    def decodes(self, program: Program, layout: Layout) -> bool:
        """Whether states in codes are decoded and encoded by the kernel, part by part: where no stage sees matrices."""
        return is_flat(program, layout)

    def binary(self) -> BinaryKernels:
        """The kernels of binary layers, for NumPy arrays."""
        from .binary import CBinary

        return CBinary()

    def emit_estimate(self, program: Program, layout: Layout, values: str) -> str:
        """The source of a kernel with a sum of noise of the kind `values` for its gradient."""
        return estimate_source(program, layout, values)

    def build_estimate(self, program: Program, layout: Layout, values: str, source: str) -> NoiseKernel:
        """The kernel of a source text of `emit_estimate`."""
        return NoiseKernel(self.build(program, layout, source))

    def fill_noise(self, out: Any, noise: Noise, offset: int = 0) -> None:
        """Writes elements `offset` and on of noise into a NumPy array or a PyTorch tensor, contiguous."""
        fill(self, out, noise, offset)


class CKernel:
    """Compiled C for one program and layout."""

    def __init__(self, program: Program, layout: Layout, library: ctypes.CDLL) -> None:
        self.program, self.layout, self.library = program, layout, library

    def bind(self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = ()) -> CCall:
        """A call over these tensors: contiguous, of the layout's dtypes. Their addresses are read now.

        No tensor may overlap another one, or an array of a call. TensorError for an array that is not contiguous memory
        of this machine.
        """
        from .call import CCall

        return CCall(self.library, self.program, self.layout, params, states, views)
