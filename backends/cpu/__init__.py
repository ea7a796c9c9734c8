"""The cpu backend: one kernel runs all tensors of a bucket in one call, in their own memory.

A kernel reads addresses from a table (buffers x tensors) and takes chunks of elements from a list. It updates each
element in one pass: it reads every parameter, gradient and state once, and writes each new value once. Chunks begin at
the start of each tensor and have one length, so the bits of a result depend neither on other tensors nor on threads.
A program of several stages makes several passes; each writes partial reductions, one for each chunk.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.kernel.place import moving_lines
from rulec.kernel.quantized import is_flat

from .call import OneStageCall, StagedCall
from .machine import ObjectCode, loaded
from .print import kernel_source

if TYPE_CHECKING:
    from rulec.backend.capabilities import BinaryKernels, Noise, Values

    from ..common.noise import NoiseKernel
    from .ffi import FfiKernel


class CpuBackend:
    """Kernels for tensors in main memory: NumPy arrays, and PyTorch tensors on the CPU."""

    name = "cpu"

    def unavailable_reason(self) -> str | None:
        """None with Numba on this machine; else the missing package, in one line."""
        missing = [package for package in ("numba", "llvmlite") if importlib.util.find_spec(package) is None]
        return f"{missing[0]} is not installed: pip install numba" if missing else None

    def emit(self, program: Program, layout: Layout) -> str:
        """The source of the kernel, all its stages."""
        return kernel_source(program, layout)

    def build(self, program: Program, layout: Layout, source: str) -> CpuKernel:
        """The kernel of a source text: from the cache, or compiled into it."""
        return CpuKernel(program, layout, loaded(program.name, source))

    def decodes(self, program: Program, layout: Layout) -> bool:
        """Whether states in codes are decoded and encoded by the kernel, part by part: where no stage sees matrices."""
        return is_flat(program, layout)

    def machine(self, name: str, source: str) -> ObjectCode:
        """The machine code of a printed source with a function `kernel(job)`: from the cache, or compiled into it."""
        return loaded(name, source)

    def assembly(self, name: str, source: str) -> str:
        """The machine code of a printed kernel, as a text for an assembler: see `rulec.backend.capabilities`."""
        from .machine import compile_text, emit_assembly

        return emit_assembly(compile_text(source, Path(f"{name}.py")), intel=True)

    def emit_estimate(self, program: Program, layout: Layout, values: Values) -> str:
        """The source of a kernel with noise for its gradient: see `rulec.backend.capabilities`."""
        from .noise import estimate_source

        return estimate_source(program, layout, values)

    def build_estimate(self, program: Program, layout: Layout, values: Values, source: str) -> NoiseKernel:
        """The kernel of a source text of `emit_estimate`: from the cache, or compiled into it."""
        from ..common.noise import NoiseKernel

        return NoiseKernel(CpuKernel(program, layout, loaded(f"{program.name}_{values}", source)))

    def fill_noise(self, out: Any, noise: Noise, offset: int = 0) -> None:
        """Writes elements of noise into a dense NumPy array or PyTorch tensor: see `rulec.backend.capabilities`."""
        from .noise import fill_noise

        fill_noise(out, noise, offset)

    def fill_lines(self, out: Any, noise: Noise, pairs: Sequence[int], offset: int = 0) -> None:
        """Writes the noise of direction `pairs[i]` into line i of a contiguous matrix, as `fill_noise` would."""
        from .noise import fill_lines

        fill_lines(out, noise, pairs, offset)

    def binary(self) -> BinaryKernels:
        """The kernels of binary layers, for NumPy arrays."""
        from .binary import CpuBinary

        return CpuBinary()


def limit_kernel(program: Program, layout: Layout) -> CpuKernel:
    """A kernel that moves the same bytes as the program's kernel and computes nothing: the yardstick of `rulec bench`.

    All numbers that the program reads stay the same; those that it only writes, and reductions, have no meaning.
    """
    from .print import limit_source

    return CpuKernel(program, layout, loaded(f"{program.name}_limit", limit_source(program, layout)), flat=True)


def ffi_kernel(program: Program, layout: Layout) -> FfiKernel:
    """The kernel of a program as a custom call of XLA for each stage; from the cache, or compiled into it."""
    from .ffi import FfiKernel, ffi_source
    from .machine import FFI_ENTRY

    source = ffi_source(program, layout)
    return FfiKernel(program, layout, source, loaded(f"{program.name}_ffi", source, FFI_ENTRY))


class CpuKernel:
    """Compiled code for one program and layout; `flat` where no stage sees rows and columns."""

    def __init__(self, program: Program, layout: Layout, machine: ObjectCode, flat: bool = False) -> None:
        self.program, self.layout, self.machine, self.flat = program, layout, machine, flat

    def bind(
        self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = ()
    ) -> OneStageCall | StagedCall:
        """A call over these tensors. Their addresses are read now.

        Parameters and states are NumPy arrays or PyTorch tensors, contiguous, of the layout's dtypes. None may overlap
        another one, or an array of a call.
        """
        first, *others = self.program.stages
        alone = first.roots and not others and not moving_lines(self.program, first)
        return (OneStageCall if alone else StagedCall)(
            self.machine, self.program, self.layout, params, states, views, self.flat
        )
