"""Rings of transfer buffers: tensors take turns in them.

A buffer is claimed before it is written, and released with the last copy that reads it: nothing is overwritten before
its reader has ended, and nothing is read before its writer has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rulec.torch.offload.link import Event, Link

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
        """Has buffers of at least `count` bytes, in host memory; whether there are other buffers now."""
        if self.buffers and self.buffers[0].memory.numel() >= count:
            return False
        self.wait()
        self.buffers = []
        self.buffers = [Buffer(link.host_memory(max(count, ALIGNMENT))) for _ in range(self._count)]
        return True

    def wait(self) -> None:
        """Has the host wait for all copies from or to the buffers, which nobody owns then."""
        for buffer in self.buffers:
            if buffer.event is not None:
                buffer.event.wait()
            buffer.owner = buffer.event = None


@dataclass
class Rings:
    """The link of a device, with the buffers of gradients and of weights; `last` is the last copy up."""

    link: Link
    gradients: Ring
    weights: Ring
    last: Event | None = field(default=None)

    @property
    def buffers(self) -> list[Buffer]:
        """All buffers."""
        return [*self.gradients.buffers, *self.weights.buffers]
