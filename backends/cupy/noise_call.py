"""Launches of kernels with noise: its records on the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.kernel.multi_tensor.uploads import Ring, Uploads

from ..common.noise import Table, sum_dtype
from ..common.noise_call import RecordsCall
from .call import CudaCall
from .memory import Functions, Memory, used
from .work import Work


class CudaNoiseCall(RecordsCall[Work], CudaCall):
    """A call with noise in place of gradients. Each tensor begins at element `offset` of its noise."""

    def __init__(
        self, program: Program, layout: Layout, functions: Functions, threads: int, memory: Memory,
        params: Sequence[Any], states: Sequence[dict[str, Any]], offset: int, ring: Ring | None,
    ) -> None:  # fmt: skip
        super().__init__(program, layout, functions, threads, memory, params, states, (), ring)
        self._offset, self._dtype = offset, sum_dtype(layout)
        self._records = Uploads(self._ring, 0, spares=0 if ring else 1)

    def _sent(self, table: Table, stream: Any) -> int:
        with used(self._memory, stream) as current:
            return int(self._records.put(table, current, current.ptr, bool(current.is_capturing())).data.ptr)


@functools.cache
def shared_ring(device: int) -> Ring:
    """The one ring of all calls bound with `once` on a device: a call with its own ring would wait at its end."""
    return Ring(Memory(device))
