"""Launches of kernels that make noise: its records on the device, and random words."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout

from ..noise import Table, sum_dtype
from ..noise_call import RecordsCall
from .call import CudaCall, Functions
from .memory import Memory, Ring, used
from .work import Work


class CudaNoiseCall(RecordsCall[Work], CudaCall):
    """A call with noise in the place of gradients, of which each tensor begins with element `offset`."""

    def __init__(
        self, program: Program, layout: Layout, functions: Functions, threads: int, memory: Memory,
        params: Sequence[Any], states: Sequence[dict[str, Any]], offset: int, ring: Ring | None,
    ) -> None:  # fmt: skip
        super().__init__(program, layout, functions, threads, memory, params, states, (), ring)
        self._offset, self._dtype = offset, sum_dtype(layout)
        self._records: Any = None

    def _sent(self, table: Table, stream: Any) -> int:
        import cupy

        with used(self._memory, stream) as current:
            if self._records is None or self._records.size < table.size:
                self._records = cupy.empty(table.size, np.int64)
            at = int(self._records.data.ptr)
            self._ring.copy(at, table, current)
        return at


@functools.cache
def shared_ring(device: int) -> Ring:
    """The ring of calls that are made once: one that goes away would wait for what is copied from its own."""
    return Ring(0, 0)
