"""Calls of kernels that make noise: its records on the device, and random words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rulec.backend.noise import Noise
from rulec.backend.protocol import Rows, Scratch, Written
from rulec.compiler.ir import Program, Stage
from rulec.compiler.layout import Layout
from rulec.errors import TensorError

from ..noise import record_addresses, records, sum_dtype
from .blocks import INTERPRETER, Block
from .call import TritonCall
from .memory import Uploads
from .work import StageWork

#: Elements of a block: of popcount noise each thread makes one block of words, the fewest that leave none idle.
NOISY = Block(2048, 128)

#: Blocks of four words that a program of the grid makes.
WORD_BLOCKS = 256


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


def fill_words(kernel: Any, out: Any, position: Noise, offset: int) -> None:
    """Writes raw words into a contiguous tensor of int32: see `TritonBackend.fill_words`."""
    import torch

    if out.dtype is not torch.int32 or not 1 <= out.ndim <= 2:
        raise TensorError(
            f"random words go into a tensor of int32 of one or two dimensions, and this one is of {out.dtype} and has "
            f"{out.ndim}: make one of that kind"
        )
    rows, count = (1, out.shape[0]) if out.ndim == 1 else out.shape
    blocks = -(-(offset + count) // 4) - offset // 4
    numbers = (*position.key, position.high, position.first, position.step & 0xFFFFFFFF, offset)
    if rows and blocks:
        kernel[(-(-blocks // WORD_BLOCKS), rows)](out, count, *numbers, BLOCK=WORD_BLOCKS)
