"""The triton backend: one launch for a stage and bucket, on NVIDIA's and AMD's GPUs, over torch tensors.

A program of the grid takes one chunk of one tensor. Addresses come from tables, so tensors may lie anywhere; addresses
of gradients are read at every call. Without a GPU the same kernels run in Triton's interpreter (TRITON_INTERPRET=1, set
before the import of Triton), slowly, on tensors in main memory.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rulec.backend.capabilities import Noise
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.errors import BackendUnsupported, TensorError
from rulec.extras import command
from rulec.kernel.quantized import is_flat

from ..common.noise import fill
from ..common.text import run_source
from .draws import draws_source
from .epilogue import epilogue_source
from .noise import estimate_source
from .print import program_source
from .quintic import quintic_source
from .segments import segments_source

if TYPE_CHECKING:
    from .call import TritonCall
    from .draws import Draws
    from .noise import TritonNoiseCall
    from .product import ProductKernel
    from .quintic_call import QuinticProducts
    from .segments import Segments


class TritonBackend:
    """Kernels in Triton, for torch tensors on GPUs."""

    name = "triton"
    on_device = True
    narrow = True

    def unavailable_reason(self) -> str | None:
        """None with a usable GPU or the interpreter; else the missing part, in words."""
        for package in ("triton", "torch"):
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed: {command('triton', 'torch')}"
        if interpreted():
            return None
        import torch

        if not torch.cuda.is_available():
            return "torch finds no GPU: use another backend, or set TRITON_INTERPRET=1 to run Triton's interpreter"
        return _driver_trouble()

    def emit(self, program: Program, layout: Layout) -> str:
        """The source of the kernels of all stages."""
        return program_source(program, layout)

    def decodes(self, program: Program, layout: Layout) -> bool:
        """Whether the kernels read and write states in codes: where no such stage sees rows or columns."""
        return is_flat(program, layout)

    def build(self, program: Program, layout: Layout, source: str) -> TritonKernel:
        """The kernel of a source text. Triton compiles it at the first call, and keeps it in its own cache."""
        kernels = _kernels(program.name, source)
        return TritonKernel(program, layout, kernels, lambda: _narrow_kernels(program, layout))

    def emit_epilogue(self, program: Program, layout: Layout, factors: str) -> str:
        """The source of a kernel that computes a gradient tile by tile, a product of `factors`, and updates with it."""
        return epilogue_source(program, layout, factors)

    def build_epilogue(self, program: Program, layout: Layout, factors: str, source: str) -> ProductKernel:
        """The kernel of a source text of `emit_epilogue`."""
        from .product import ProductKernel

        return ProductKernel(program, layout, factors, _kernels(program.name, source)["product"])

    def has_quintic(self, device: Any) -> bool:
        """Whether Triton's products run on a device's units for products: not on NVIDIA's GPUs before Ampere."""
        import torch

        if device.type == "cpu" or torch.version.hip:
            return True
        return torch.cuda.get_device_capability(device)[0] >= 8

    def emit_quintic(self, dtype: str) -> str:
        """The source of kernels for the products of `newton_schulz`, of matrices in a dtype of 16 bits."""
        return quintic_source(dtype)

    def build_quintic(self, dtype: str, source: str) -> QuinticProducts:
        """The products by the kernels of a source text of `emit_quintic`."""
        from .quintic_call import QuinticProducts

        kernels = _kernels("newton_schulz", source)
        return QuinticProducts(kernels["product"], dividing=kernels["divided"])

    def emit_segments(self) -> str:
        """The source of a kernel that reduces runs of a vector."""
        return segments_source()

    def build_segments(self, source: str) -> Segments:
        """The reduction by the kernel of a source text of `emit_segments`."""
        from .segments import Segments

        return Segments(_kernels("segments", source)["segments"])

    def emit_draws(self) -> str:
        """The source of a kernel that writes random numbers of rules."""
        return draws_source()

    def build_draws(self, source: str) -> Draws:
        """The random numbers by the kernel of a source text of `emit_draws`."""
        from .draws import Draws

        return Draws(_kernels("draws", source)["draws"])

    def emit_estimate(self, program: Program, layout: Layout, values: str) -> str:
        """The source of a kernel with a sum of noise of the kind `values` for its gradient."""
        return estimate_source(program, layout, values)

    def build_estimate(self, program: Program, layout: Layout, values: str, source: str) -> TritonEstimate:
        """The kernel of a source text of `emit_estimate`."""
        return TritonEstimate(program, layout, _kernels(program.name, source))

    def fill_noise(self, out: Any, noise: Noise, offset: int = 0) -> None:
        """Writes elements `offset` and on of noise into a contiguous tensor, in its device's current stream."""
        fill(self, out, noise, offset)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@functools.cache
def _driver_trouble() -> str | None:
    """The reason why Triton does not run on torch's GPU, in one line; None where it runs."""
    import triton

    try:
        triton.runtime.driver.active.get_current_target()
    except (RuntimeError, OSError, AttributeError, AssertionError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"Triton does not find the driver of the GPU that torch finds ({lines[0]}): install a triton of its kind"
    return None


@functools.lru_cache(maxsize=1024)
def _kernels(name: str, source: str) -> Mapping[str, Any]:
    return run_source("triton", name, source)


def _narrow_kernels(program: Program, layout: Layout) -> Mapping[str, Any]:
    """The kernels for gradients at any address, which few programs need: they are printed at the first need."""
    return _kernels(program.name, program_source(program, layout, narrow=True))


class TritonKernel:
    """The kernels of one program and layout, by the name of the printed function.

    `narrow` prints those for gradients at any address; with None, such gradients take the common kernels.
    """

    def __init__(
        self, program: Program, layout: Layout, kernels: Mapping[str, Any],
        narrow: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        self.program, self.layout, self.kernels, self.narrow = program, layout, kernels, narrow

    def bind(
        self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = ()
    ) -> TritonCall:
        """A call over these tensors: contiguous, of the layout's dtypes, all on one device. Addresses are read now.

        TensorError for tensors of several devices, or not on a GPU; BackendUnsupported for arrays other than PyTorch's.
        """
        from .call import TritonCall

        self._check(params, states)
        return TritonCall(self.program, self.layout, self.kernels, params, states, views, self.narrow)

    def _check(self, params: Sequence[Any], states: Sequence[dict[str, Any]]) -> None:
        if any(not hasattr(p, "data_ptr") for p in params):
            raise BackendUnsupported("triton", "an update of arrays other than PyTorch's", self.program.name)
        places = [str(p.device) for p in params]
        devices = {*places, *(str(x.device) for s in states for x in s.values() if hasattr(x, "device"))}
        if "cpu" in devices and not interpreted():
            which = f"parameter {places.index('cpu')}" if "cpu" in places else "a state"
            raise TensorError(
                f"{self.program.name}: {which} is in main memory, which the triton backend does not reach: move it to "
                "a GPU, or choose the backend cpu"
            )
        if len(devices) > 1:
            raise TensorError(
                f"{self.program.name}: the triton backend updates tensors of one device at a time, and was given some "
                f"on {' and '.join(sorted(devices))}: move them to one, or bind those of each device on their own"
            )


class TritonEstimate(TritonKernel):
    """The kernels of a program with noise in place of gradients."""

    def bind(
        self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = (),
        offset: int = 0,
    ) -> TritonNoiseCall:  # fmt: skip
        """A call with Noise for gradients. Each tensor begins at element `offset` of its noise, a multiple of 128."""
        from .noise import TritonNoiseCall

        self._check(params, states)
        return TritonNoiseCall(self.program, self.layout, self.kernels, params, states, offset)
