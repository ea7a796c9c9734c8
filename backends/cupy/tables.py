"""Tables of whole numbers on a device, and the one that goes there with a call, in one copy, where it has changed."""

from __future__ import annotations

from typing import Any

import numpy as np

from rulec.backend.protocol import Rows
from rulec.kernel.bucket.cut import Whole

from .memory import Memory, Ring
from .plan import GIVEN, PACK
from .work import Work


class DeviceTable:
    """A table that does not change; `at` is its address."""

    def __init__(self, content: Whole, ring: Ring, stream: Any) -> None:
        import cupy

        self.count = len(content)
        self._array = cupy.empty(max(1, content.size), np.int64)
        self.at = int(self._array.data.ptr)
        if content.size:
            ring.copy(self.at, content, stream)


class GivenTable:
    """What comes with a call, for each tensor: `GIVEN` words and addresses; behind it a scalar table of NumPy's.

    It is copied to the device as a whole, in one piece, and only where anything of it is new. A graph that has captured
    such a copy makes it at every replay, after which nothing is known of what the device has.
    """

    def __init__(self, tensors: int, lines: int) -> None:
        self.words = np.zeros((tensors, len(GIVEN) + lines), np.int64)
        self._sent_by: Any = None
        self._captured = False
        self._allot(self.words.size)

    def _allot(self, size: int) -> None:
        """Room for so many words, here and on the device."""
        import cupy

        before = self.words
        self._host, self._sent = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.words = self._host[: before.size].reshape(before.shape)
        self.words[:] = before
        self._device = cupy.empty(max(1, size), np.int64)
        self.at = int(self._device.data.ptr)
        self._valid = 0

    def fill(self, work: Work, low: Whole, rows: Rows) -> None:
        """Each tensor's row, and whether all that a stage moves of it begins at multiples of 16 bytes.

        `low` has for each tensor the bits of those of its addresses that do not change.
        """
        self.words[:, 0] = rows.index
        addresses = self.words[:, [len(GIVEN) + column for column in work.given]]
        bits = low | np.bitwise_or.reduce(addresses, axis=1)
        self.words[:, 1] = work.even & (bits % PACK == 0)

    def send(self, rows: Rows, memory: Memory, ring: Ring, stream: Any) -> int:
        """Brings the device up to date; gives the address of the scalar table."""
        size = start = self.words.size
        known_here = type(rows.table) is np.ndarray
        if known_here:
            size += rows.table.size
            if size > self._host.size:
                self._allot(2 * size)
            self._host[start:size] = rows.table.reshape(-1).view(np.int64)
        known = self._sent_by == stream.ptr and size <= self._valid and not self._captured
        if not (known and np.array_equal(self._host[:size], self._sent[:size])):
            once = ring.copy(self.at, self._host[:size], stream)
            self._sent[:size] = self._host[:size]
            self._valid, self._sent_by = size, stream.ptr
            self._captured = self._captured or not once
        return self.at + 8 * start if known_here else memory.address(rows.table)
