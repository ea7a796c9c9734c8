"""Calls of kernels with noise: its records on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rulec.compiler.ir import Program, Stage
from rulec.compiler.layout import Layout

from ..common.noise import Table, sum_dtype
from ..common.noise_call import RecordsCall
from .blocks import INTERPRETER, Block
from .call import TritonCall
from .memory import current, is_capturing, uploads
from .work import StageWork

#: The block of a kernel with noise: with popcount noise, each thread makes one block of words, and none is idle.
NOISY = Block(2048, 128)


class NoisyWork(StageWork):
    """The work over a bucket of a stage with noise for its gradient."""

    @staticmethod
    def emulates(stage: Stage, layout: Layout) -> bool:
        """Whether the kernel rounds to bfloat16, in stores or in gradients."""
        return StageWork.emulates(stage, layout) or layout.dtype("g") == "bfloat16"

    @staticmethod
    def flat_block(moved: int, device: str) -> Block:
        """The block, the same for any number of bytes."""
        return StageWork.flat_block(moved, device) if device == INTERPRETER else NOISY


class TritonNoiseCall(RecordsCall[StageWork], TritonCall):
    """A call with noise in place of gradients. Each tensor begins at element `offset` of its noise."""

    work_kind = NoisyWork

    def __init__(
        self, program: Program, layout: Layout, kernels: Mapping[str, Any], params: Sequence[Any],
        states: Sequence[dict[str, Any]], offset: int,
    ) -> None:  # fmt: skip
        super().__init__(program, layout, kernels, params, states, ())
        self._offset, self._dtype = offset, sum_dtype(layout)
        self._records = uploads(self._device, 0, self._ring)

    def _sent(self, table: Table, stream: Any) -> int:
        with current(self._device, stream):
            return self._address(self._records.put(table, stream, stream, is_capturing(self._device)))
