"""Calls on a device with noise in place of gradients: records of the noise go to the device first."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from rulec.backend.capabilities import Noise
from rulec.backend.protocol import Rows, Scratch, Written
from rulec.kernel.multi_tensor.call import AddressedCall, Needs

from .noise import RECORD, Table, records


class RecordsCall(AddressedCall[Needs]):
    """A call with noise in place of gradients, summed in `_dtype`. A tensor begins at element `_offset` of noise."""

    _offset: int
    _dtype: str
    _records_at: int

    def __call__(
        self, stage: int, moving: Sequence[Noise], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Updates every tensor of the bucket, or `tensors` of it, in place. `moving` is the noise of each."""
        self._records_at = self._sent(records(moving, self._offset, self._dtype), stream)
        return super().__call__(stage, moving, rows, scratch, tensors=tensors, stream=stream)

    def _addresses(self, moving: Sequence[Any]) -> Sequence[int]:
        record = 8 * len(RECORD)
        return range(self._records_at, self._records_at + record * len(moving), record)

    @abstractmethod
    def _sent(self, table: Table, stream: Any) -> int:
        """Copies a table of records to the device. Its address there."""
