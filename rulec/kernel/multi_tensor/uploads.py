"""Small tables from main memory to a device during a step: one asynchronous copy, and nobody waits.

A copy from pinned memory is still under way when its call returns. So pieces of pinned memory are used in turns, and
none is written again before its last copy has arrived: while the oldest is under way there is one more. A captured copy
runs again at every replay of the graph: its piece, and its memory on the device, have no other use.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import numpy as np

from .cut import Whole


class Pinned(Protocol):
    """Memory of the host that a device copies `words` from."""

    words: Whole

    def arrived(self) -> bool:
        """Whether the last copy from them has arrived, without waiting for it."""
        ...

    def copy(self, target: Any, count: int, stream: Any, captured: bool) -> None:
        """Begins a copy of `count` words to memory on the device. A `captured` copy cannot be waited for."""
        ...


class Device(Protocol):
    """The allocator of pinned memory and of memory on the device."""

    def pinned(self, words: int) -> Pinned:
        """Memory of the host."""
        ...

    def memory(self, words: int) -> Any:
        """Memory on the device."""
        ...


class Ring:
    """Pinned memory for tables on their way to a device, the least recently used first: as much as is under way."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._pieces: deque[Pinned] = deque()
        self._kept: list[Pinned] = []

    def copy(self, target: Any, table: Whole, stream: Any, captured: bool = False) -> None:
        """Copies a vector to memory on the device."""
        piece = self._for_good(len(table)) if captured else self._free(len(table))
        piece.words[: len(table)] = table
        piece.copy(target, len(table), stream, captured)

    def _for_good(self, words: int) -> Pinned:
        """A piece for one captured copy alone."""
        self._kept.append(self.device.pinned(words))
        return self._kept[-1]

    def _free(self, words: int) -> Pinned:
        """The least recently used piece, if the last copy from it has arrived; else, or if it is short, a new one."""
        free = self._pieces and self._pieces[0].arrived()
        piece = self._pieces.popleft() if free else self.device.pinned(words)
        self._pieces.append(piece if len(piece.words) >= words else self.device.pinned(words))
        return self._pieces[-1]


class Uploads:
    """A table of 64-bit words on a device, copied there whenever it differs from the last one.

    No memory may be allocated while a graph is captured, so memory is held ready for `spares` captured copies.
    """

    def __init__(self, ring: Ring, words: int, spares: int) -> None:
        self._ring, self._words, self._spares = ring, words, spares
        self._last: tuple[Any, Whole] | None = None
        self._memory: Any = None
        self._spare: list[tuple[Pinned, Any]] = []
        self._captured: list[tuple[Pinned, Any]] = []

    def put(self, table: Whole, stream: Any, name: Any, capturing: bool) -> Any:
        """The table on the device, ready for later work in the stream of this name.

        It is valid until the next call; a captured table is valid as long as this object lives.
        """
        if capturing:
            return self._put_captured(table, stream)
        before = self._last[1] if self._last is not None and len(self._last[1]) == len(table) else None
        if before is not None and self._last[0] == name and (before == table).all():  # type: ignore[index]
            return self._memory
        if self._memory is None or len(table) > self._words:
            self._words = max(self._words, len(table))
            self._memory, self._spare = self._ring.device.memory(self._words), []
        self._ring.copy(self._memory, table, stream)
        if before is None:
            before = np.empty_like(table)
        before[:] = table
        self._last = name, before
        while len(self._spare) < self._spares:
            self._spare.append(self._pair(self._words))
        return self._memory

    def _put_captured(self, table: Whole, stream: Any) -> Any:
        fits = self._spare and len(self._spare[-1][0].words) >= len(table)
        piece, memory = self._spare.pop() if fits else self._pair(len(table))
        self._captured.append((piece, memory))
        piece.words[: len(table)] = table
        piece.copy(memory, len(table), stream, captured=True)
        return memory

    def _pair(self, words: int) -> tuple[Pinned, Any]:
        return self._ring.device.pinned(words), self._ring.device.memory(words)


class CallArguments:
    """The arguments of a call in memory: `words` of each tensor, then the scalar table where it is a NumPy array."""

    def __init__(self, tensors: int, columns: int) -> None:
        self.count = tensors * columns
        self._shape = tensors, columns
        self._allot(np.zeros(self.count, np.int64))

    def _allot(self, memory: Whole) -> None:
        #: All of it, as one vector.
        self._whole = memory
        self.words = memory[: self.count].reshape(self._shape)

    def with_scalars(self, table: Any) -> Whole:
        """The words, and behind them the scalar table where it is NumPy's."""
        if type(table) is not np.ndarray:
            return self._whole[: self.count]
        if self.count + table.size != len(self._whole):
            self._allot(np.concatenate([self._whole[: self.count], np.zeros(table.size, np.int64)]))
        self._whole[self.count :] = table.reshape(-1).view(np.int64)
        return self._whole
