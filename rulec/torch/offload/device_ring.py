"""Rings of transfer buffers in the memory of a device: copies and kernels there wait for each other, the host does not.

A buffer is free once the last copy down from it has ended. Copies down end in their order. So the tensors of the next
copy up into the buffer are on the host by then: they were copied down from this buffer, their only place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rulec.torch.offload.link import Event, Link, Pairs
from rulec.torch.offload.ring import ALIGNMENT, Buffer, Ring

#: The buffers of a ring: one is filled, one is computed in, and one is copied down.
BUFFERS = 3


@dataclass(eq=False)
class BufferOwner:
    """What has a buffer for a time.

    The buffer may be written after the event `free`, and read after the events `waits`. `used` is True while kernels
    may read and write it.
    """

    free: Event | None = field(default=None, init=False)
    waits: list[Event] = field(default_factory=list, init=False)
    used: bool = field(default=False, init=False)

    def fetch(self, link: Link, pairs: Pairs) -> None:
        """Begins to copy into the buffer."""
        if pairs:
            self.waits.append(link.up(pairs, after=self.free))

    def hold(self, link: Link) -> None:
        """Has the device wait until the buffer may be read and written."""
        for event in self.waits:
            link.hold(event)
        self.waits, self.used = [], True


class DeviceRing(Ring):
    """The ring of a device behind a link. Its buffers' owners are of `BufferOwner`."""

    def __init__(self, link: Link) -> None:
        super().__init__(BUFFERS)
        self.link = link

    def fit(self, needed: Iterable[tuple[int, int]]) -> None:
        """Has buffers of the bytes that are needed, as pairs of a turn and its bytes; larger ones stay."""
        sizes = [ALIGNMENT] * BUFFERS
        for turn, count in needed:
            sizes[turn % BUFFERS] = max(sizes[turn % BUFFERS], count)
        self.close()
        buffers: list[Buffer | None] = [*self.buffers] or [None] * BUFFERS
        self.buffers = []
        for place, size in enumerate(sizes):
            buffer = buffers[place]
            if buffer is None or buffer.memory.numel() < size:
                buffers[place] = buffer = None  # it is freed first
                buffers[place] = Buffer(self.link.device_memory(size))
        self.buffers = [buffer for buffer in buffers if buffer is not None]
        ready = self.link.down([])  # kernels of before may still use the memory
        for buffer in self.buffers:
            buffer.event = ready

    def take(self, turn: int, owner: BufferOwner) -> None:
        """Gives the buffer of a turn to another owner, which waits for the copies of the one before it."""
        buffer = self.of(turn)
        before: BufferOwner | None = buffer.owner
        owner.free = buffer.event
        owner.waits = [*([] if before is None else before.waits), *([] if owner.free is None else [owner.free])]
        buffer.owner = owner

    def give_back(self, turn: int, owner: BufferOwner, pairs: Pairs) -> None:
        """Begins to copy down what the owner of the buffer of a turn has written, and takes the buffer back."""
        owner.hold(self.link)
        self.release(turn, self.link.down(pairs))
        owner.used = False

    def close(self) -> None:
        """Has the host wait for all copies; nobody owns a buffer then."""
        for turn, buffer in enumerate(self.buffers):
            if buffer.owner is not None:  # of a step that was not whole
                self.give_back(turn, buffer.owner, ())
        self.wait()
