"""A large tensor that is updated piece by piece, where its rule looks at one element at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from rulec.backend.protocol import Rows, Scratch, Written
from rulec.compiler.layout import reads_parameter, scale_name
from rulec.errors import PartialUpdate
from rulec.formats import Format
from rulec.runtime.buckets.bucket import Bucket, Version
from rulec.runtime.buckets.launch import Launch
from rulec.runtime.stages.noise import OtherCalls
from rulec.torch.offload.link import ENDED, Event
from rulec.torch.offload.ring import ALIGNMENT, Rings
from rulec.torch.tensors.tensors import DTYPES


class PieceCalls:
    """The calls of kernels for tensors larger than a transfer buffer, bound to the pieces of each."""

    def __init__(self) -> None:
        self._calls = OtherCalls()
        self._current: list[PieceCall] = []

    def give(
        self, launch: Launch, rings: Rings, most: int, param: Tensor, grad: Tensor | None, arrived: bool
    ) -> None:  # fmt: skip
        """Has a launch of one tensor move its gradient and its weights itself, in pieces of at most `most` bytes.

        `param` and `grad` are the tensors on the device, in one memory order; None where no gradient is read. A
        gradient that has `arrived` is in host memory, and is not moved.
        """
        position, bucket = launch.part.positions[0] if launch.part.positions else 0, launch.part.bucket
        # The version is another one once histories do not turn.
        call = self._calls.give(
            launch, f"pieces of {position}", lambda: PieceCall(launch.version, bucket, position, rings, most)
        )
        launch.grads = [grad]
        call.param, call.grad = in_memory_order(param), None if grad is None else in_memory_order(grad)
        call.arrived = arrived
        self._current.append(call)

    def release(self) -> None:
        """Drops the gradients, so that their memory is free once the user drops them."""
        for call in self._current:
            call.grad = None
        self._current = []


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as a vector, in the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


class PieceCall:
    """A kernel of one elementwise stage, bound to the pieces of one tensor as if each were a tensor.

    `param` and `grad` are vectors on the device, for the next call; a gradient that has `arrived` is in host memory.
    """

    param: Tensor
    grad: Tensor | None
    arrived: bool

    def __init__(self, version: Version, bucket: Bucket, position: int, rings: Rings, most: int) -> None:
        like, states, formats = bucket.params[position], bucket.states[position], version.layout.formats
        self._bucket, self._position, self._rings = bucket, position, rings
        self._reads = reads_parameter(version.program)
        dtype = DTYPES[version.layout.dtype("g")]
        self._spans = piece_spans(like.numel(), most // max(like.element_size(), dtype.itemsize), formats)
        longest = self._spans[0].stop
        rings.gradients.grow(rings.link, longest * dtype.itemsize)
        rings.weights.grow(rings.link, longest * like.element_size())
        lengths = [span.stop - span.start for span in self._spans]
        self._gradients = [rings.gradients.of(k).memory.view(dtype)[:n] for k, n in enumerate(lengths)]
        self._weights = [rings.weights.of(k).memory.view(like.dtype)[:n] for k, n in enumerate(lengths)]
        self._call = version.kernel.bind(self._weights, [piece_of(states, span, formats) for span in self._spans])

    def __call__(
        self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Updates the tensor in place, piece by piece: the gradient of the next is on its way while one is computed."""
        of_pieces = rows_of_pieces(rows, self._position, len(self._spans))
        done = 0
        try:
            arriving = self._fetch(0)
            for k in range(len(self._spans)):
                arrived, arriving = arriving, self._fetch(k + 1)
                self._update(k, arrived, of_pieces)
                done = k + 1
                self._send(k)
        except Exception as error:
            if done == 0:
                raise
            raise ended_after(self._spans[done - 1].stop, self._bucket.params[self._position], error) from error
        return Written(self._bucket.params, self._bucket.states)

    def _fetch(self, k: int) -> Event | None:
        """Begins to copy down what piece k reads; None after the last piece."""
        if k == len(self._spans):
            return None
        rings, span = self._rings, self._spans[k]
        pairs = []
        if self.grad is not None and not self.arrived:
            rings.gradients.claim(k, self)
            pairs.append((self._gradients[k], self.grad[span]))
        if self._reads:
            rings.weights.claim(k, self)
            pairs.append((self._weights[k], self.param[span]))
        event = rings.link.down(pairs) if pairs else ENDED
        if not self.arrived:
            rings.gradients.fill(k, event)
        if self._reads:
            rings.weights.fill(k, event)
        return event

    def _update(self, k: int, arrived: Event | None, rows: Rows) -> None:
        """Updates piece k, once it has arrived."""
        rings = self._rings
        assert arrived is not None
        arrived.wait()
        if not self._reads:
            rings.weights.claim(k, self)
        grad = self._gradients[k]
        if self.grad is not None and self.arrived:
            grad = self.grad[self._spans[k]]
        self._call(0, [grad], rows, tensors=[k])

    def _send(self, k: int) -> None:
        """Begins to copy piece k up, and gives its buffers back."""
        rings = self._rings
        if not self.arrived:
            rings.gradients.release(k)
        rings.last = rings.link.up([(self.param[self._spans[k]], self._weights[k])])
        rings.weights.release(k, rings.last)


def rows_of_pieces(rows: Rows, position: int, count: int) -> Rows:
    """The rows of the scalar table for `count` pieces of the tensor at a position: all have the tensor's."""
    return replace(rows, index=np.full(count, int(rows.index[position]), np.int64))


def ended_after(count: int, param: Tensor, error: BaseException) -> PartialUpdate:
    """The error of an update that failed after some elements of a tensor."""
    return PartialUpdate(
        f"an update failed after the first {count} elements of a tensor of shape {tuple(param.shape)}: {error}"
    )


def piece_spans(count: int, most: int, formats: Sequence[tuple[str, Format]]) -> list[slice]:
    """The elements of each piece of a tensor of `count`: at most `most`, and whole blocks of every state in codes."""
    step = math.lcm(ALIGNMENT, *(form.block for _, form in formats))
    size = max(step, most // step * step)
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def piece_of(states: Mapping[str, Tensor], span: slice, formats: Sequence[tuple[str, Format]]) -> dict[str, Tensor]:
    """The states of some elements, whole blocks of those in codes."""
    of_formats = dict(formats)
    scales = {scale_name(name): form for name, form in formats}
    piece = {}
    for name, state in states.items():
        per = 1
        if name in of_formats:
            per = 8 // of_formats[name].bits
        elif name in scales:
            per = scales[name].block
        piece[name] = in_memory_order(state)[span.start // per : -(-span.stop // per)]
    return piece
