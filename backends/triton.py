"""The triton backend: one launch for a bucket, on NVIDIA's and AMD's GPUs, over torch tensors.

A program of the grid takes one chunk of one tensor. Addresses come from tables, so tensors may lie anywhere; gradient
addresses are read at every call. Without a GPU the same kernels run in Triton's interpreter (TRITON_INTERPRET=1, set
before Triton is imported), slowly, on tensors in main memory.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from rulec.backend.layout import Layout
from rulec.backend.protocol import Rows, Written
from rulec.compiler.ir import Program
from rulec.compiler.view import MatrixView
from rulec.errors import BackendUnsupported

from .printed import run_source
from .triton_print import KernelPrinter

#: Elements in a chunk: what one program of the grid computes.
CHUNK = 1024


class TritonBackend:
    """Kernels in Triton, for torch tensors on GPUs."""

    name = "triton"

    def unavailable_reason(self) -> str | None:
        """None where there is a GPU or the interpreter; else what is missing."""
        for package in ("triton", "torch"):
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed: pip install {package}"
        if interpreted():
            return None
        import torch

        if torch.cuda.is_available():
            return None
        return "torch finds no GPU: use another backend, or set TRITON_INTERPRET=1 to run Triton's interpreter"

    def emit(self, program: Program, layout: Layout) -> str:
        """The source of `elements` and of the kernel `step`. BackendUnsupported for what is not elementwise."""
        return KernelPrinter(program, layout).source()

    def build(self, program: Program, layout: Layout, source: str) -> TritonKernel:
        """The kernel of a source text; Triton compiles it at the first call, and keeps it in its own cache."""
        buffers = [b for b in KernelPrinter(program, layout).buffers if b != "g"]
        return TritonKernel(program.name, buffers, _step(program.name, source))


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@functools.lru_cache(maxsize=1024)
def _step(name: str, source: str) -> Any:
    return run_source("triton", name, source)["step"]


class TritonKernel:
    """The kernel of one program and layout."""

    def __init__(self, name: str, buffers: list[str], step: Any) -> None:
        self.name, self.buffers, self.step = name, buffers, step

    def bind(
        self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = ()
    ) -> TritonCall:
        """A call over these tensors: contiguous, of the layout's dtypes, all on one device; addresses are read now."""
        if any(not hasattr(p, "data_ptr") for p in params):
            raise BackendUnsupported("triton", "an update of arrays other than PyTorch's", self.name)
        return TritonCall(self, params, states)


class TritonCall:
    """A kernel bound to the parameters and states of one bucket."""

    def __init__(self, kernel: TritonKernel, params: Sequence[Any], states: Sequence[dict[str, Any]]) -> None:
        self._kernel = kernel
        self._written = Written(params, states)
        self._device = params[0].device if params else "cpu"
        arrays = [{"p": p, **s} for p, s in zip(params, states, strict=True)]
        addresses = [[a[name].data_ptr() for name in kernel.buffers] for a in arrays]
        self._aligned = [all(x % 16 == 0 for x in line) for line in addresses]
        self._sizes = [p.numel() for p in params]
        self._addresses = self._integers(addresses)
        self._lengths = self._integers(self._sizes)
        self._everything = self._chunks(range(len(params)))

    def _integers(self, values: Any) -> Any:
        import torch

        return torch.tensor(values, dtype=torch.int64).to(self._device)

    def _chunks(self, tensors: Sequence[int]) -> Any:
        """(tensor, chunk of it) for every chunk of these tensors."""
        counts = [-(-self._sizes[i] // CHUNK) for i in tensors]
        return self._integers([[i, k] for i, count in zip(tensors, counts, strict=True) for k in range(count)])

    def __call__(
        self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Any = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Updates every tensor of the bucket, or `tensors` of it, in place; returns the bound params and states.

        Runs on `stream` (a torch stream), by default the device's current one.
        """
        import torch

        fired = range(len(self._sizes)) if tensors is None else tensors
        chunks = self._everything if tensors is None else self._chunks(fired)
        if not len(chunks):
            return self._written
        gradients = np.zeros(len(self._sizes), np.int64)
        gradients[list(fired)] = [g.data_ptr() for g in moving]
        aligned = all(self._aligned[i] for i in fired) and not (gradients % 16).any()
        current = torch.cuda.device_of(moving[0])  # type: ignore[no-untyped-call]
        with current, torch.cuda.stream(stream), np.errstate(all="ignore"):
            self._kernel.step[(len(chunks),)](
                self._addresses, torch.from_numpy(gradients).to(self._device), self._lengths, chunks,
                torch.from_numpy(rows.index).to(self._device), torch.from_numpy(rows.table).to(self._device),
                CHUNK=CHUNK, ALIGNED=aligned, EMULATED=interpreted(), enable_fp_fusion=False,
            )  # fmt: skip
        return self._written
