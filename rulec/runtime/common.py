"""Numbers and memory that the launches of one engine share."""

from __future__ import annotations

from typing import Any

from rulec.runtime.arrays import Arrays
from rulec.runtime.hyper import HyperValues
from rulec.runtime.joins import Processes
from rulec.runtime.shared import SharedNumbers
from rulec.runtime.skips import SkippedThere


class Common:
    """The numbers and the memory that launches of one engine share, beside the tensors of each.

    `largest` is the size of the largest parameter in bytes. `skipped` counts the updates of tensors that the rule's
    `skip` prevented so far, as far as the host knows.
    """

    def __init__(self, arrays: Arrays, hyper: HyperValues, processes: Processes, seed: int) -> None:
        self.arrays, self.hyper, self.processes, self.seed = arrays, hyper, processes, seed
        self.host = arrays.library("cpu", False)
        self.shared = SharedNumbers()
        self.largest = self.skipped = 0
        self.skipped_there = SkippedThere()
        self._scratch: dict[Any, Any] = {}

    def scratch(self, slot: Any, like: Any, dtype: str) -> Any:
        """Memory for one step, like a parameter. The same slot, shape and dtype give the same memory again.

        The slot includes the device.
        """
        key = (slot, self.arrays.shape(like), dtype)
        memory = self._scratch.get(key)
        if memory is None:
            memory = self._scratch[key] = self.arrays.scratch(like, dtype)
        return memory
