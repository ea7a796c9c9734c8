"""A device without memory, torch's `meta`: nothing on it can be read, so whatever would wait for it is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from rulec.backend.protocol import Rows, Written
from rulec.compiler.ir import Program, Result
from rulec.compiler.layout import Layout
from rulec.torch.tensors.library import DeviceLibrary

DEVICE = "meta"


class Nowhere:
    """A backend whose kernels look at what they are given, and where it is, and write nothing."""

    name = "nowhere"
    on_device = True

    def unavailable_reason(self) -> None:
        return None

    def emit(self, program: Program, layout: Layout) -> str:
        return ""

    def build(self, program: Program, layout: Layout, source: str) -> NowhereKernel:
        return NowhereKernel(program, layout)


class NowhereKernel:
    def __init__(self, program: Program, layout: Layout) -> None:
        self.program, self.layout = program, layout

    def bind(self, params: Sequence[Tensor], states: Sequence[dict[str, Tensor]], views: Any = ()) -> NowhereCall:
        return NowhereCall(self, params, states, views)


class NowhereCall:
    def __init__(self, kernel: NowhereKernel, params: Any, states: Any, views: Any) -> None:
        self.kernel, self.params, self.states, self.views = kernel, params, states, views

    def __call__(
        self, stage: int, moving: Sequence[Tensor], rows: Rows, scratch: Mapping[str, Sequence[Tensor]] | None = None,
        *, tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        here = self.params[0].device
        given = [*moving, *(x for arrays in (scratch or {}).values() for x in arrays)]
        given += [x for x in (rows.table, rows.stays, rows.scale) if isinstance(x, Tensor)]
        assert {x.device for x in given} <= {here}, (
            f"{here} was given what is on { ({x.device for x in given} - {here}) }"
        )
        assert not isinstance(rows.table, Tensor) or rows.table.shape[1] == len(self.kernel.program.columns)
        assert rows.scale is None or rows.scale.dtype is torch.float32
        fired = [*(range(len(self.params)) if tensors is None else tensors)]
        reduces = self.kernel.program.stages[stage].reduces
        return Written(self.params, self.states, {r.name: self._reduced(r, fired) for r in reduces})

    def _reduced(self, result: Result, fired: Sequence[int]) -> Any:
        here = self.params[0].device
        if set(result.axes.letters) <= {"k", "n"}:
            return torch.empty(len(fired), dtype=torch.float64, device=here)
        views = [self.views[i] for i in fired]
        rows = "i" in result.axes.letters
        shapes = [(v.batch, v.rows, 1) if rows else (v.batch, 1, v.cols) for v in views]
        return [torch.empty(shape, dtype=torch.float64, device=here) for shape in shapes]


@contextmanager
def copies() -> Iterator[list[int]]:
    """The sizes of what is copied to the device meanwhile, one after the other."""
    copied: list[int] = []

    def numbers(self: DeviceLibrary, values: Any) -> Tensor:
        if isinstance(values, Tensor):
            assert values.device == self.device or not values.dim()
            return values
        copied.append(values.nbytes)
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    with mock.patch.object(DeviceLibrary, "numbers", numbers):
        yield copied
