"""The mlx backend: functions of MLX arrays. MLX is lazy, and fuses them under `mx.compile`.

Reductions are in float64 on the CPU, and in float32 on a GPU, as it has no wider numbers.
"""

from __future__ import annotations

import functools
from typing import Any

from rulec.compiler.view import MatrixView

from ..common.functional import Done, PureBackend, PureKernel
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

        scalars = [*mx.asarray(row, getattr(mx, self.layout.compute))]
        new, reduced = self.stage(index, {**stored, **call_arrays}, scalars, view)
        return {**stored, **new}, {name: np.array(value).astype(np.float64) for name, value in reduced.items()}


class MlxBackend(PureBackend):
    """Functions of MLX's arrays."""

    name = "mlx"
    kernel = MlxKernel
    cached = staticmethod(functools.lru_cache(maxsize=1024)(MlxKernel))
    float64 = "MLX's CPU: call mlx.core.set_default_device(mlx.core.cpu)"

    def has_float64(self) -> bool:
        """Whether MLX computes on the CPU."""
        return bool(wide().size == 8)
