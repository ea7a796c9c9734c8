"""Gradients of a backward pass on their way to the host, and the batches in which they are worked on there.

A gradient is copied into a pinned buffer as soon as it is there, and its memory on the device is let go when the copy
has ended. What lies in one buffer is a batch. A full buffer is handed to the worker, and gradients go on into the next
one; where all buffers are with the worker, the backward pass waits. So the device holds the gradients of all
buffers and the one at hand at most, and one larger than a buffer, which moves in pieces while it is worked on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock
from typing import TypeAlias

import torch
from torch import Tensor

from rulec.torch.offload.link import Event, Link
from rulec.torch.offload.ring import aligned, bytes_of, view_in
from rulec.torch.offload.worker import Worker
from rulec.torch.tensors.fake import plain_memory
from rulec.torch.tensors.tensors import is_dense

#: Work on the gradients with some indices: they have arrived on the host, or (False) are on their device.
Work: TypeAlias = Callable[[Sequence[int], Sequence[Tensor], bool], None]

#: The buffers of a device: one fills while the other is worked on.
_BUFFERS = 2

#: The part of a device's gradients in a buffer: after the last gradient, this much is left to do.
_PART = 16


@dataclass
class Batch:
    """The gradients in one buffer: their indices, and tensors of the host or, of one large gradient, of the device."""

    memory: Tensor
    work: Work
    places: list[int] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    bytes: int = 0
    event: Event | None = None


@dataclass(frozen=True)
class _Held:
    """A gradient on the device, until its copy is over."""

    gradient: Tensor
    event: Event
    let_go: Callable[[], None]


class DeviceGradients:
    """The way of one device's gradients: the link, the buffers, and the gradients that are still held there.

    `size` is the size of a buffer in bytes. A larger gradient stays on the device.
    """

    def __init__(self, link: Link, size: int, worker: Worker) -> None:
        self.link, self.size, self._worker = link, size, worker
        self._buffers: list[Tensor] = []
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self._open: Batch | None = None
        self._held: deque[_Held] = deque()
        self._mutex = Lock()

    def take(self, place: int, grad: Tensor, work: Work, let_go: Callable[[], None]) -> None:
        """Begins to copy a gradient down, for `work`; calls `let_go` when its memory is let go."""
        count = aligned(bytes_of(grad))
        if count > self.size:
            self._take_large(place, grad, work, let_go)
            return
        if self._open is not None and (self._open.bytes + count > self.size or self._open.work != work):
            self.hand_over()
        if self._open is None:
            self._open = Batch(self._next_buffer(), work)
        batch = self._open
        view = view_in(batch.memory, batch.bytes, _dense(grad))
        event = batch.event = self.link.down([(view, grad)])
        batch.places.append(place)
        batch.gradients.append(view)
        batch.bytes += count
        with self._mutex:
            self._held.append(_Held(grad, event, let_go))
        self.sweep()

    def _next_buffer(self) -> Tensor:
        """A buffer that is free, waiting for one."""
        if not self._buffers:
            self._buffers = [self.link.host_memory(self.size) for _ in range(_BUFFERS)]
            self._free_all()
        memory = self._free.get()
        self._worker.check()
        return memory

    def _free_all(self) -> None:
        self._free = SimpleQueue()
        for memory in self._buffers:
            self._free.put(memory)

    def _take_large(self, place: int, grad: Tensor, work: Work, let_go: Callable[[], None]) -> None:
        """Hands over a gradient that stays on the device, alone, after all others."""
        self.hand_over()
        self._worker.wait()
        complete = self.link.down([])
        held = [grad]

        def do() -> None:
            try:
                if not self._worker.failed:
                    complete.wait()
                    work([place], [*held], False)
            finally:
                held.clear()
                let_go()

        del grad
        self._worker.give(do)

    def hand_over(self) -> None:
        """Hands over the gradients that have come since the last time."""
        batch, self._open = self._open, None
        if batch is not None:
            self._worker.give(lambda: self._do(batch))

    def _do(self, batch: Batch) -> None:
        try:
            if not self._worker.failed:
                assert batch.event is not None
                batch.event.wait()
                self.sweep()
                batch.work(batch.places, batch.gradients, True)
        finally:  # also after an error: the backward pass waits for a buffer
            self._free.put(batch.memory)

    def sweep(self) -> None:
        """Lets gradients go whose copies are over."""
        with self._mutex:
            while self._held and self._held[0].event.over():
                self._held.popleft().let_go()

    def stop(self) -> None:
        """Drops the gradients that were not handed over; the worker has stopped."""
        with self._mutex:
            for held in self._held:
                held.event.wait()
                held.let_go()
            self._held.clear()
        self._open = None
        self._free_all()


class GradientCopies:
    """The gradients of all devices on their way to the host: `by_device` by device."""

    def __init__(self, by_device: Mapping[torch.device, DeviceGradients], worker: Worker) -> None:
        self._by_device, self._worker = by_device, worker

    @property
    def devices(self) -> set[torch.device]:
        """The devices."""
        return {*self._by_device}

    def take(self, place: int, grad: Tensor, work: Work, let_go: Callable[[], None]) -> None:
        """Takes the complete gradient of the parameter with this index: see `DeviceGradients.take`."""
        self._worker.check()
        self._by_device[grad.device].take(place, grad, work, let_go)

    def settle(self) -> None:
        """Returns when all gradients that came are worked on; raises the error of the work."""
        for gradients in self._by_device.values():
            gradients.hand_over()
        self._worker.wait()

    def wait_for_devices(self) -> None:
        """Returns when the devices have done all that they were given by this thread."""
        for event in [gradients.link.down([]) for gradients in self._by_device.values()]:
            event.wait()

    def stop(self) -> None:
        """Drops what is not worked on, and returns when nothing is."""
        self._worker.stop()
        for gradients in self._by_device.values():
            gradients.stop()


def buffer_size(sizes: Sequence[int], most: int) -> int:
    """The bytes of a buffer for gradients of these sizes, of at most `most` bytes."""
    largest = max((aligned(size) for size in sizes if aligned(size) <= most), default=0)
    with_vectors = aligned(largest + largest // 4)
    return min(most, max(sum(map(aligned, sizes)) // _PART, with_vectors))


def _dense(grad: Tensor) -> Tensor:
    """A tensor of a gradient's shape and dtype without gaps in memory: in its memory order, if it has none."""
    if is_dense(grad):
        return grad
    with plain_memory():
        return torch.empty(grad.shape, dtype=grad.dtype, device="meta")
