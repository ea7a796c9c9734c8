"""The mlx backend: functions of MLX arrays. MLX is lazy, and fuses them under `mx.compile`.

Reductions are in float64 on the CPU, and in float32 on a GPU, as it has no wider numbers.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.errors import BackendUnavailable

from ..pure import Done, PureBackend, PureKernel
from .print import MlxFunction
from .words import wide


class MlxKernel(PureKernel):
    """The functions of one program and layout."""

    function = MlxFunction

    def stored(self, buffer: str, value: Any, shape: tuple[int, ...]) -> Any:
        """A value in the dtype of its buffer and the shape of its tensor."""
        import mlx.core as mx

        array = mx.asarray(value, getattr(mx, self.layout.dtype(buffer)))
        return array if array.shape == shape else mx.broadcast_to(array, shape)

    def run(self, index: int, stored: Any, call_arrays: Any, row: Any, view: MatrixView | None) -> Done:
        """A stage of one tensor, with its reductions as NumPy arrays of float64."""
        import mlx.core as mx
        import numpy as np

        dtype = getattr(mx, self.layout.compute)
        scalars = [mx.array(float(number), dtype) for number in row]
        new, reduced = self.stage(index, {**stored, **call_arrays}, scalars, view)
        return {**stored, **new}, {name: np.array(value).astype(np.float64) for name, value in reduced.items()}


#: From a program, layout and source to the kernel, cached: a second build for the same program traces nothing again.
_kernel = functools.lru_cache(maxsize=1024)(MlxKernel)


class MlxBackend(PureBackend):
    """Functions of MLX's arrays."""

    name = "mlx"
    kernel = MlxKernel

    def unavailable_reason(self) -> str | None:
        """None with MLX on this machine; else the remedy, in one line."""
        return None if importlib.util.find_spec("mlx") else "mlx is not installed: pip install 'mlx[cpu]' (Mac: mlx)"

    def build(self, program: Program, layout: Layout, source: str) -> MlxKernel:
        """The kernel of a source text. BackendUnavailable for float64 where MLX computes on a GPU."""
        import mlx.core as mx

        if layout.compute == "float64" and wide() != mx.float64:
            raise BackendUnavailable(
                f"{program.name} on float64 needs MLX's CPU: call mlx.core.set_default_device(mlx.core.cpu), or use "
                "float32"
            )
        return _kernel(program, layout, source)
