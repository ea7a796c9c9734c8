"""What the launches of one engine have in common."""

from __future__ import annotations

from typing import Any

from rulec.runtime.arrays import Arrays
from rulec.runtime.hyper import HyperValues
from rulec.runtime.joins import Processes
from rulec.runtime.shared import SharedNumbers
from rulec.runtime.skips import SkippedThere


class Common:
    """The numbers and the memory that launches of one engine read and write beside those of their tensors.

    `largest` has the bytes of the largest parameter, as its gradient has them; `skipped` counts the updates of tensors
    that were skipped so far, by the rule's own condition, as far as the host knows.
    """

    def __init__(self, arrays: Arrays, hyper: HyperValues, processes: Processes, seed: int) -> None:
        self.arrays, self.hyper, self.processes, self.seed = arrays, hyper, processes, seed
        self.host = arrays.library("cpu", False)
        self.shared = SharedNumbers()
        self.largest = self.skipped = 0
        self.skipped_there = SkippedThere()
        self._scratch: dict[Any, Any] = {}

    def scratch(self, slot: Any, like: Any, dtype: str) -> Any:
        """Memory for one step, like a parameter; the same again for the same slot, which says the device, and shape."""
        key = (slot, self.arrays.shape(like), dtype)
        found = self._scratch.get(key)
        if found is None:
            found = self._scratch[key] = self.arrays.scratch(like, dtype)
        return found
