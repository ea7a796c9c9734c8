"""Tables of whole numbers on a device: constant tables, and the table of a call, copied only when changed."""

from __future__ import annotations

from typing import Any

import numpy as np

from rulec.backend.protocol import Rows
from rulec.kernel.multi_tensor.cut import Whole
from rulec.kernel.multi_tensor.uploads import Given, Ring, Uploads

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
    """The table of a call: `GIVEN` words and addresses for each tensor, and then the scalar table, if it is NumPy's.

    It goes to the device in one copy, and only when changed.
    """

    def __init__(self, tensors: int, lines: int, uploads: Uploads) -> None:
        self._table, self._uploads = Given(tensors, len(GIVEN) + lines), uploads

    @property
    def words(self) -> Whole:
        """A row for each tensor."""
        return self._table.words

    def fill(self, work: Work, low: Whole, rows: Rows) -> None:
        """Writes each tensor's row, and the truth that all its arrays in a stage begin at multiples of 16 bytes.

        `low` has, for each tensor, the bitwise or of its fixed addresses.
        """
        words = self.words
        words[:, 0] = rows.index
        addresses = words[:, [len(GIVEN) + column for column in work.per_call]]
        bits = low | np.bitwise_or.reduce(addresses, axis=1)
        words[:, 1] = work.even & (bits % PACK == 0)

    def send(self, rows: Rows, memory: Memory, stream: Any) -> tuple[int, int]:
        """Copies the table to the device if changed. The addresses there of the table and of the scalar table."""
        sent = self._uploads.put(self._table.with_scalars(rows.table), stream, stream.ptr, bool(stream.is_capturing()))
        at = int(sent.data.ptr)
        host = type(rows.table) is np.ndarray
        return at, at + 8 * self._table.count if host else memory.address(rows.table)
