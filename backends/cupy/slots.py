"""The slots for totals of kernels, and the work of joining them to results, in an order that never changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rulec.kernel.multi_tensor.cut import Whole, counted, parts
from rulec.kernel.multi_tensor.slots import Places, Region, chosen

from .memory import Memory
from .plan import FINISH, THREADS

#: Bytes of a total.
_BYTES = 8


class Slots:
    """The slots and results of a stage's reductions on the device.

    Where a row or column lies in a single tile, its total is the result.
    """

    def __init__(self, regions: Sequence[Region], memory: Memory) -> None:
        self._places = Places(regions, direct=True)
        self._slots, results = (memory.empty(max(1, n)) for n in (self._places.slots, self._places.results))
        slots_at, self._results_at = memory.address(self._slots), memory.address(results)
        self._views = self._places.views(results)
        self._starts = [
            np.where(self._joined(region), slots_at + _BYTES * first, self._results_at + _BYTES * to)
            for region, first, to in zip(regions, self._places.first, self._places.to, strict=True)
        ]

    @staticmethod
    def _joined(region: Region) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """The truth, for each tensor, that its results are not its slots."""
        return (region.counts > 1) | (region.shapes is None)

    def addresses(self) -> dict[str, Whole]:
        """The address of each tensor's first slot, by reduction; for whole tensors, of the first slot of all."""
        pairs = zip(self._places.regions, self._starts, strict=True)
        return {r.name: starts[:1] if r.shapes is None else starts for r, starts in pairs}

    def finish(self, fired: Sequence[int]) -> Whole:
        """The work of joining the totals of these tensors: a line of `FINISH` words for each block."""
        chosen = np.asarray(fired, np.int64)
        lines = [self._finish(i, chosen) for i in range(len(self._places.regions))]
        return np.concatenate([np.zeros((0, len(FINISH)), np.int64), *lines])

    def _finish(self, number: int, fired: Whole) -> Whole:
        region, targets = self._places.regions[number], self._places.targets(number, fired)
        sizes, terms = region.sizes[fired], region.counts[fired]
        needed = self._joined(region)[fired] | (terms == 0)
        which, block = counted(np.where(needed, parts(sizes, THREADS), 0))
        done = THREADS * block
        words = {
            "source": self._starts[number][fired[which]] + _BYTES * done,
            "target": self._results_at + _BYTES * (targets[which] + done),
            "count": np.minimum(THREADS, sizes[which] - done), "stride": sizes[which], "terms": terms[which],
            "kind": np.full(len(which), region.code),
        }  # fmt: skip
        return np.stack([words[name] for name in FINISH], axis=1).astype(np.int64)

    def results(self, fired: Sequence[int]) -> dict[str, Any]:
        """The results of these tensors by name, valid until the stage runs again.

        One array with a number for each tensor, or a list of arrays `(batch, rows, 1)` or `(batch, 1, cols)`.
        """
        return chosen(self._views, fired)
