"""A device that is not one: the numpy backend behind the contract of backends that work on a device.

Everything that the runtime hands over is looked at: rows, vectors and what is reduced must be torch's, and nothing of
NumPy's but a table that was known before the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from rulec.backend import registry
from rulec.backend.protocol import Backend, Call, Rows, Written
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout


class Elsewhere:
    """The backend."""

    name = "elsewhere"
    on_device = True

    def __init__(self) -> None:
        self.inner: Backend = registry.get("numpy")

    def unavailable_reason(self) -> None:
        return None

    def emit(self, program: Program, layout: Layout) -> str:
        return self.inner.emit(program, layout)

    def build(self, program: Program, layout: Layout, source: str) -> ElsewhereKernel:
        return ElsewhereKernel(self.inner.build(program, layout, source), program)


class Here(Elsewhere):
    """The same kernels on the host."""

    name = "here"
    on_device = False

    def build(self, program: Program, layout: Layout, source: str) -> Any:
        return HereKernel(self.inner.build(program, layout, source), program)


class ElsewhereKernel:
    def __init__(self, inner: Any, program: Program) -> None:
        self.inner, self.program = inner, program

    def bind(self, params: Sequence[Tensor], states: Sequence[dict[str, Tensor]], views: Any = ()) -> ElsewhereCall:
        inner = self.inner.bind(list(map(_array, params)), [_arrays(own) for own in states], views)
        return self.call(inner, self.program, params, states)

    @property
    def call(self) -> type[ElsewhereCall]:
        return ElsewhereCall


class HereKernel(ElsewhereKernel):
    @property
    def call(self) -> type[ElsewhereCall]:
        return HereCall


class ElsewhereCall:
    def __init__(self, inner: Call, program: Program, params: Any, states: Any) -> None:
        self.inner, self.program, self.params, self.states = inner, program, params, states

    def __call__(
        self, stage: int, moving: Sequence[Tensor], rows: Rows, scratch: Mapping[str, Sequence[Any]] | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        fired = [*(range(len(self.params)) if tensors is None else tensors)]
        assert all(isinstance(x, Tensor) for arrays in (scratch or {}).values() for x in arrays)
        if rows.scale is not None:
            moving = [(g / rows.scale).to(g.dtype) for g in moving]
        known = Rows(_numpy(rows.table), rows.index)
        before = [self._copy(i) for i in fired]
        reduced = self.compute(stage, moving, known, scratch, tensors)
        if rows.stays is not None:
            assert rows.stays.dtype is torch.bool
            assert len(rows.stays) == len(rows.table)
            for i, old in zip(fired, before, strict=True):
                if rows.stays[rows.index[i]]:
                    self._restore(i, old)
        return Written(self.params, self.states, {name: _tensors(found) for name, found in reduced.items()})

    def compute(self, stage: int, moving: Any, rows: Rows, scratch: Any, tensors: Any) -> Mapping[str, Any]:
        arrays = {name: list(map(_array, found)) for name, found in (scratch or {}).items()}
        return self.inner(stage, list(map(_array, moving)), rows, arrays, tensors=tensors).reduced

    def _copy(self, i: int) -> list[Tensor]:
        return [x.clone() for x in (self.params[i], *self.states[i].values())]

    def _restore(self, i: int, old: Sequence[Tensor]) -> None:
        for into, value in zip((self.params[i], *self.states[i].values()), old, strict=True):
            into.copy_(value)


class HereCall(ElsewhereCall):
    def __call__(
        self, stage: int, moving: Sequence[Tensor], rows: Rows, scratch: Mapping[str, Sequence[Any]] | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        return Written(self.params, self.states, self.compute(stage, moving, rows, scratch, tensors))


def _array(x: Any) -> np.ndarray[Any, Any]:
    if isinstance(x, Tensor) and x.dtype is torch.bfloat16:
        array: np.ndarray[Any, Any] = x.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return array
    return x.numpy() if isinstance(x, Tensor) else x


def _arrays(own: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _array(x) for name, x in own.items()}


def _numpy(table: Any) -> np.ndarray[Any, Any]:
    if isinstance(table, np.ndarray):
        return table
    assert table.dtype is torch.float64
    assert table.is_contiguous()
    return table.numpy()


def _tensors(found: Any) -> Any:
    return [torch.from_numpy(np.array(x)) for x in found] if isinstance(found, list) else torch.from_numpy(found)
