"""Rings of transfer buffers: tensors take turns in them.

A buffer is claimed before it is written, and released with the last copy that reads it: nothing is overwritten before
its reader has ended, and nothing is read before its writer has.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rulec.errors import RulecError
from rulec.torch.offload.link import Event, Link
from rulec.torch.tensors.fake import plain_memory

#: Tensors in a buffer begin at multiples of this many bytes: a cache line, and the widest vector.
ALIGNMENT = 64


def aligned(count: int) -> int:
    """The bytes that a tensor of `count` bytes takes in a buffer."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def bytes_of(tensor: Tensor) -> int:
    """The bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def view_in(memory: Tensor, offset: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the shape, memory order and dtype (or another dtype) of a tensor, at an offset in a buffer."""
    dtype = dtype or like.dtype
    with plain_memory():
        flat = memory[offset : offset + like.numel() * dtype.itemsize].view(dtype)
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset())


@dataclass
class Buffer:
    """One buffer of a ring: its `memory` as bytes, its `owner`, and the `event` after which it may be written."""

    memory: Tensor
    owner: Any = None
    event: Event | None = None


class Ring:
    """`count` buffers that tensors take turns in: turn k has buffer k modulo their number."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.buffers: list[Buffer] = []

    def of(self, turn: int) -> Buffer:
        """The buffer of a turn."""
        return self.buffers[turn % self._count]

    def claim(self, turn: int, owner: Any) -> None:
        """Takes the buffer of a turn, once what its last owner copies has ended; an owner may claim it again."""
        buffer = self.of(turn)
        if buffer.owner is owner:
            return
        if buffer.event is not None:
            buffer.event.wait()
        buffer.owner, buffer.event = owner, None

    def fill(self, turn: int, event: Event) -> None:
        """Notes the copy that fills the buffer of a turn: another owner waits for it."""
        self.of(turn).event = event

    def is_of(self, turn: int, owner: Any) -> bool:
        """Whether the buffer of a turn is still this owner's."""
        return self.of(turn).owner is owner

    def release(self, turn: int, event: Event | None = None) -> None:
        """Gives the buffer of a turn back, to be written after an event."""
        buffer = self.of(turn)
        buffer.owner, buffer.event = None, event

    def grow(self, link: Link, count: int) -> bool:
        """Has buffers of at least `count` bytes, in host memory; whether there are other buffers now.

        TensorError where there is no memory; then the buffers are as before.
        """
        if self.buffers and self.buffers[0].memory.numel() >= count:
            return False
        self.wait()
        self.buffers = [Buffer(link.host_memory(max(count, ALIGNMENT))) for _ in range(self._count)]
        return True

    def drop(self) -> None:
        """Frees the buffers, once all copies have ended."""
        self.wait()
        self.buffers = []

    def wait(self) -> None:
        """Has the host wait for all copies from or to the buffers, which nobody owns then.

        RulecError, at the end, where one failed.
        """
        failed: RulecError | None = None
        for buffer in self.buffers:
            try:
                if buffer.event is not None:
                    buffer.event.wait()
            except RulecError as error:
                failed = failed or error
            buffer.owner = buffer.event = None
        if failed is not None:
            raise failed


@dataclass
class Rings:
    """The link of a device, with the buffers of gradients and of weights; `last` is the last copy up."""

    link: Link
    gradients: Ring
    weights: Ring
    last: Event | None = field(default=None)

    def hold(self) -> None:
        """Has the device wait for the last copy up, before all that it is given to do from now on."""
        if self.last is not None:
            self.link.hold(self.last)
            self.last = None

    def free(self) -> None:
        """Has the host wait for all copies of a step that failed. Such a step has left buffers to their owners.

        The device waits for them too: an interrupt may end the wait of the host. The step's own error has been raised,
        and that of a copy is no news.
        """
        rings = self.gradients, self.weights
        buffers = [buffer for ring in rings for buffer in ring.buffers]
        if all(buffer.owner is None for buffer in buffers):
            return
        for event in (buffer.event for buffer in buffers if buffer.event is not None):
            self.link.hold(event)
        for ring in rings:
            with suppress(RulecError):
                ring.wait()

    def apart(self, turn: int, other: int) -> bool:
        """Whether two turns have no buffer in common."""
        return all(ring.of(turn) is not ring.of(other) for ring in (self.gradients, self.weights) if ring.buffers)

    @property
    def buffers(self) -> list[Buffer]:
        """All buffers."""
        return [*self.gradients.buffers, *self.weights.buffers]
