"""Small tables that go from main memory to a device while a step runs: one asynchronous copy, and nobody waits.

A copy from pinned memory is still under way when the call that began it returns. So pieces of it are used in turns, and
none is written again before what was copied from it has arrived. What a graph captures is copied again at every replay:
its piece, and its place on the device, are never used for anything else.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from .cut import Whole

#: Pieces of a ring: so many copies may be under way before a call must wait for the oldest.
TURNS = 16


class Pinned(Protocol):
    """Memory of the host that a device copies `words` from."""

    words: Whole

    def ready(self) -> Whole:
        """Its words, once nothing is copied from them any more."""
        ...

    def copy(self, target: Any, count: int, stream: Any, captured: bool) -> None:
        """Begins a copy of so many words to memory on the device; what is `captured` may not be waited for."""
        ...


class Device(Protocol):
    """What allocates such memory, and memory on the device."""

    def pinned(self, words: int) -> Pinned:
        """Memory of the host."""
        ...

    def memory(self, words: int) -> Any:
        """Memory on the device."""
        ...


class Ring:
    """Pinned memory through which tables go to a device in order."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._pieces: list[Pinned] = []
        self._turn = 0
        self._kept: list[Pinned] = []

    def copy(self, target: Any, table: Whole, stream: Any, captured: bool = False) -> None:
        """Copies a vector to memory on the device."""
        piece = self._for_good(len(table)) if captured else self._free(len(table))
        piece.words[: len(table)] = table
        piece.copy(target, len(table), stream, captured)

    def _for_good(self, words: int) -> Pinned:
        """A piece that nothing else will ever be copied from."""
        self._kept.append(self.device.pinned(words))
        return self._kept[-1]

    def _free(self, words: int) -> Pinned:
        """The piece that was used longest ago, once nothing is copied from it any more."""
        turn, self._turn = self._turn, (self._turn + 1) % TURNS
        if turn == len(self._pieces):
            self._pieces.append(self.device.pinned(words))
        if len(self._pieces[turn].ready()) < words:
            self._pieces[turn] = self.device.pinned(words)
        return self._pieces[turn]


class Uploads:
    """A table of 64-bit words on a device, which is copied there whenever it is another than before.

    No memory may be allocated while a graph is captured, so `spares` are held ready for so many captured copies.
    """

    def __init__(self, ring: Ring, words: int, spares: int) -> None:
        self._ring, self._words, self._spares = ring, words, spares
        self._last: tuple[Any, Whole] | None = None
        self._memory: Any = None
        self._spare: list[tuple[Pinned, Any]] = []
        self._captured: list[tuple[Pinned, Any]] = []

    def put(self, table: Whole, stream: Any, name: Any, capturing: bool) -> Any:
        """The table on the device, ready for what follows in a stream of that name.

        It holds until the next call, or as long as this object where it is captured.
        """
        if capturing:
            return self._put_captured(table, stream)
        if self._last is not None and self._last[0] == name and np.array_equal(self._last[1], table):
            return self._memory
        if self._memory is None or len(table) > self._words:
            self._words = max(self._words, len(table))
            self._memory, self._spare = self._ring.device.memory(self._words), []
        self._ring.copy(self._memory, table, stream)
        self._last = name, table.copy()
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


class Given:
    """What comes with a call: `words` of each tensor, and behind them the scalar table, where that is NumPy's."""

    def __init__(self, tensors: int, columns: int) -> None:
        self.count = tensors * columns
        self._shape = tensors, columns
        self._allot(np.zeros(self.count, np.int64))

    def _allot(self, memory: Whole) -> None:
        #: All of it, as one vector.
        self._whole = memory
        self.words = memory[: self.count].reshape(self._shape)

    def with_scalars(self, table: Any) -> Whole:
        """The words, and behind them a scalar table that is NumPy's."""
        if type(table) is not np.ndarray:
            return self._whole[: self.count]
        if self.count + table.size != len(self._whole):
            self._allot(np.concatenate([self._whole[: self.count], np.zeros(table.size, np.int64)]))
        self._whole[self.count :] = table.reshape(-1).view(np.int64)
        return self._whole
