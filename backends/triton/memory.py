"""Small tables that go from main memory to the device while a step runs: one asynchronous copy, and nobody waits.

A copy from pinned memory is still under way when the call that began it returns. So the buffers it reads from are used
in turns, and none is written again before the event behind its copy has happened. What a CUDA graph captures reads its
buffer at every replay: such a buffer is never used again, and kept as long as the call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Words = np.ndarray[Any, np.dtype[np.int64]]

#: Buffers in a ring: so many copies may be under way before a call must wait for the oldest.
TURNS = 8
#: Buffers held ready for captured calls, for what is needed while a graph is captured cannot always be allocated then.
SPARE = 4


class Slot:
    """A buffer in main memory, pinned for a GPU, that a copy reads from; `event` is behind the last one."""

    def __init__(self, words: int, device: Any) -> None:
        import torch

        self.memory = torch.empty(words, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self.numbers: Words = self.memory.numpy()
        self.event: Any = None

    def ready(self) -> Words:
        """The memory, once no copy reads from it any more."""
        if self.event is not None:
            self.event.synchronize()
        return self.numbers

    def copy_to(self, target: Any) -> None:
        """Begins a copy to the device, on its current stream."""
        import torch

        target.copy_(self.memory[: len(target)], non_blocking=True)
        if target.is_cuda:
            self.event = self.event or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()


class Uploads:
    """A table of 64-bit words on a device, which is copied there whenever it is another than before."""

    def __init__(self, words: int, device: Any) -> None:
        self._device = device
        self._words = words
        self._ring: list[Slot] = []
        self._turn = 0
        self._last: Words | None = None
        self._memory: Any = None
        self._target: Any = None
        self._spare: list[tuple[Slot, Any]] = []
        self._captured: list[tuple[Slot, Any]] = []

    def put(self, table: Words, capturing: bool) -> Any:
        """The table on the device: an int64 tensor, which holds until the next call, or as long as this object where
        it is captured."""
        if capturing:
            return self._put_captured(table)
        self._keep_spare()
        if self._last is not None and np.array_equal(self._last, table):
            return self._target
        self._prepare(len(table))
        slot = self._ring[self._turn]
        self._turn = (self._turn + 1) % len(self._ring)
        slot.ready()[: len(table)] = table
        self._target = self._memory[: len(table)]
        slot.copy_to(self._target)
        self._last = table.copy()
        return self._target

    def _put_captured(self, table: Words) -> Any:
        """The same while a graph is captured, from a buffer of the graph's own."""
        fits = self._spare and len(self._spare[-1][0].numbers) >= len(table)
        slot, memory = self._spare.pop() if fits else self._pair(len(table))
        self._captured.append((slot, memory))
        slot.numbers[: len(table)] = table
        target = memory[: len(table)]
        target.copy_(slot.memory[: len(table)], non_blocking=True)
        return target

    def _prepare(self, words: int) -> None:
        """Allocates what calls need, before the first and where a table is longer than any before."""
        if self._ring and len(self._memory) >= words:
            return
        self._words = max(self._words, words)
        turns = TURNS if self._device.type == "cuda" else 1
        self._ring = [Slot(self._words, self._device) for _ in range(turns)]
        self._turn = 0
        self._memory = self._allocated(self._words)
        self._spare = []

    def _keep_spare(self) -> None:
        """Allocates what the next capture may need, while none is on the way."""
        while self._device.type == "cuda" and len(self._spare) < SPARE:
            self._spare.append(self._pair(self._words))

    def _pair(self, words: int) -> tuple[Slot, Any]:
        return Slot(words, self._device), self._allocated(words)

    def _allocated(self, words: int) -> Any:
        import torch

        return torch.empty(words, dtype=torch.int64, device=self._device)
