"""Calls of kernels that make noise: its records on the device, and random words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rulec.backend.noise import Noise
from rulec.backend.protocol import Rows, Scratch, Written
from rulec.compiler.ir import Program, Stage
from rulec.compiler.layout import Layout

from ..noise import record_addresses, records, sum_dtype
from .blocks import INTERPRETER, Block
from .call import TritonCall
from .memory import Uploads
from .work import StageWork

#: Elements of a block: of popcount noise each thread makes one block of words, the fewest that leave none idle.
NOISY = Block(2048, 128)


class NoisyWork(StageWork):
    """What the stage of a rule whose gradient is noise needs to run over a bucket."""

    @staticmethod
    def emulates(stage: Stage, layout: Layout) -> bool:
        """Of gradients too."""
        return StageWork.emulates(stage, layout) or layout.dtype("g") == "bfloat16"

    @staticmethod
    def flat_block(moved: int, device: str) -> Block:
        """The same for all."""
        return StageWork.flat_block(moved, device) if device == INTERPRETER else NOISY


class TritonNoiseCall(TritonCall):
    """A call with noise in the place of gradients, of which each tensor begins with element `offset`."""

    work_kind = NoisyWork

    def __init__(
        self, program: Program, layout: Layout, kernels: Mapping[str, Any], params: Sequence[Any],
        states: Sequence[dict[str, Any]], offset: int,
    ) -> None:  # fmt: skip
        super().__init__(program, layout, kernels, params, states, ())
        self._offset, self._dtype = offset, sum_dtype(layout)
        self._records = Uploads(0, self._device)
        self._at = 0

    def __call__(
        self, stage: int, moving: Sequence[Noise], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Updates every tensor of the bucket, or `tensors` of it, in place: `moving` is the noise of each."""
        with self._on(stream):
            sent = self._records.put(records(moving, self._offset, self._dtype), self._capturing())
        self._at = self._address(sent)
        return super().__call__(stage, moving, rows, scratch, tensors=tensors, stream=stream)

    def _read_gradients(self, stage: int, moving: Sequence[Any], fired: tuple[int, ...] | None) -> None:
        at = slice(None) if fired is None else list(fired)
        self._gradients[at] = record_addresses(len(moving), self._at)
