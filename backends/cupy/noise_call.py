"""Launches of kernels that make noise: its records on the device, and random words."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from rulec.backend.noise import Noise
from rulec.backend.protocol import Rows, Scratch, Written
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout

from ..noise import record_addresses, records, sum_dtype
from .call import CudaCall, Functions
from .memory import Memory, Ring, used


class CudaNoiseCall(CudaCall):
    """A call with noise in the place of gradients, of which each tensor begins with element `offset`."""

    def __init__(
        self, program: Program, layout: Layout, functions: Functions, threads: int, memory: Memory,
        params: Sequence[Any], states: Sequence[dict[str, Any]], offset: int, ring: Ring | None,
    ) -> None:  # fmt: skip
        super().__init__(program, layout, functions, threads, memory, params, states, (), ring)
        self._offset, self._dtype = offset, sum_dtype(layout)
        self._records: Any = None
        self._at = 0

    def __call__(
        self, stage: int, moving: Sequence[Noise], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Updates every tensor of the bucket, or `tensors` of it, in place: `moving` is the noise of each."""
        with used(self._memory, stream) as current:
            self._at = self._sent(moving, current)
        return super().__call__(stage, moving, rows, scratch, tensors=tensors, stream=stream)

    def _sent(self, noises: Sequence[Noise], stream: Any) -> int:
        """Brings records of noise to the device; their address."""
        import cupy

        found = records(noises, self._offset, self._dtype)
        if self._records is None or self._records.size < found.size:
            self._records = cupy.empty(found.size, np.int64)
        at = int(self._records.data.ptr)
        self._ring.copy(at, found, stream)
        return at

    def _addresses(self, moving: Sequence[Any]) -> list[int]:
        return record_addresses(len(moving), self._at)


@functools.cache
def shared_ring(device: int) -> Ring:
    """The ring of calls that are made once: one that goes away would wait for what is copied from its own."""
    return Ring(0, 0)
