"""Backends that say they work on the device, made from the numpy backend: one as it should be, others with a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rulec.backend.protocol import Rows
from rulec_backends.numpy import NumpyCall
from tests.testing.broken import BrokenBackend


class DeviceCall(NumpyCall):
    """Does what `Rows` says: divides gradients by `scale`, and leaves alone what `stays`."""

    def __call__(
        self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Any = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        if rows.scale is not None:
            factor = self.factor(rows.scale)
            moving = [(g.astype(np.float64) * factor).astype(g.dtype) for g in moving]
        staying = self.staying(rows)
        before = [[x.copy() for x in self._own(i)] for i in staying]
        written = super().__call__(stage, moving, replace(rows, stays=None, scale=None), scratch, tensors=tensors)
        for i, kept in zip(staying, before, strict=True):
            for array, old in zip(self._own(i), kept, strict=True):
                array[...] = old
        return written

    def _own(self, i: int) -> list[Any]:
        return [self._params[i], *self._states[i].values()]

    def factor(self, scale: Any) -> float:
        """What gradients are multiplied by."""
        return float(np.float32(1 / scale.astype(np.float64)[0]))

    def staying(self, rows: Rows) -> list[int]:
        """The tensors that are to be left alone."""
        return [] if rows.stays is None else [i for i, row in enumerate(rows.index) if rows.stays[row]]


class OnTheDevice(BrokenBackend):
    """Without a fault."""

    name = "on-the-device"
    on_device = True
    call = DeviceCall


class NeverStays(OnTheDevice):
    """Updates all tensors."""

    name = "never-stays"

    class call(DeviceCall):
        def staying(self, rows: Rows) -> list[int]:
            return []


class StaysByTensor(OnTheDevice):
    """Takes `stays` to have one truth for each tensor, not for each row."""

    name = "stays-by-tensor"

    class call(DeviceCall):
        def staying(self, rows: Rows) -> list[int]:
            return [] if rows.stays is None else [i for i, stay in enumerate(rows.stays[: len(self._params)]) if stay]


class Unscaled(OnTheDevice):
    """Takes gradients as they come."""

    name = "unscaled"

    class call(DeviceCall):
        def factor(self, scale: Any) -> float:
            return 1.0


class ScaledTwice(OnTheDevice):
    """Multiplies by the scale."""

    name = "scaled-twice"

    class call(DeviceCall):
        def factor(self, scale: Any) -> float:
            return float(scale[0])
