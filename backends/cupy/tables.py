"""Tables of whole numbers on a device, and the one that goes there with a call, in one copy, where it has changed."""

from __future__ import annotations

from typing import Any

import numpy as np

from rulec.backend.protocol import Rows
from rulec.kernel.bucket.cut import Whole
from rulec.kernel.bucket.uploads import Given, Ring, Uploads

from .memory import Memory
from .plan import GIVEN, PACK
from .work import Work


class DeviceTable:
    """A table that does not change; `at` is its address."""

    def __init__(self, content: Whole, ring: Ring, stream: Any) -> None:
        self.count = len(content)
        self._array = ring.device.memory(content.size)
        self.at = int(self._array.data.ptr)
        if content.size:
            ring.copy(self._array, content.reshape(-1), stream, bool(stream.is_capturing()))


class GivenTable:
    """What comes with a call, for each tensor: `GIVEN` words and addresses; behind it a scalar table of NumPy's.

    It is copied to the device as a whole, in one piece, and only where anything of it is new.
    """

    def __init__(self, tensors: int, lines: int, uploads: Uploads) -> None:
        self._given, self._uploads = Given(tensors, len(GIVEN) + lines), uploads

    @property
    def words(self) -> Whole:
        """A row for each tensor."""
        return self._given.words

    def fill(self, work: Work, low: Whole, rows: Rows) -> None:
        """Each tensor's row, and whether all that a stage moves of it begins at multiples of 16 bytes.

        `low` has for each tensor the bits of those of its addresses that do not change.
        """
        words = self.words
        words[:, 0] = rows.index
        addresses = words[:, [len(GIVEN) + column for column in work.given]]
        bits = low | np.bitwise_or.reduce(addresses, axis=1)
        words[:, 1] = work.even & (bits % PACK == 0)

    def send(self, rows: Rows, memory: Memory, stream: Any) -> tuple[int, int]:
        """Brings the device up to date; gives the addresses of the table there, and of the scalar table."""
        sent = self._uploads.put(self._given.with_scalars(rows.table), stream, stream.ptr, bool(stream.is_capturing()))
        at = int(sent.data.ptr)
        host = type(rows.table) is np.ndarray
        return at, at + 8 * self._given.count if host else memory.address(rows.table)
