"""Numbers and memory that the launches of one engine share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rulec.array_api.library import Library
from rulec.language.expr.node import Op
from rulec.runtime.arrays import Arrays
from rulec.runtime.buckets.hyper import HyperValues
from rulec.runtime.buckets.reductions import Processes
from rulec.runtime.buckets.shared_scalars import SharedNumbers


class DeviceSkipCounter:
    """Counts the steps with a skipped update of a tensor, on the device; the host does not wait.

    The count keeps its address, so that replays of a captured step advance it.
    """

    def __init__(self) -> None:
        self._now: list[tuple[Any, Library]] = []
        self._count: tuple[Any, Library] | None = None

    def note(self, some: Any, library: Library) -> None:
        """Notes a number on a device that is 1 where some tensor's update was skipped in this step, else 0."""
        self._now.append((some, library))

    def close(self) -> None:
        """Counts the step as skipped where one of its launches was."""
        if not self._now:
            return
        some, library = self._now[0]
        for other, _ in self._now[1:]:
            some = library.arithmetic[Op.MAXIMUM](some, library.numbers(other))
        self._now = []
        if self._count is None:
            self._count = library.copy(some), library
            return
        before, counting = self._count
        counting.write(before, before + counting.numbers(some))

    def steps(self, host: Library) -> int:
        """The count of such steps. Waits for the device."""
        return 0 if self._count is None else int(host.numbers(self._count[0]))


class EngineContext:
    """The context of one engine: numbers and memory that its launches share, beside the tensors of each.

    `largest` is the size of the largest parameter in bytes. `skipped` counts the updates of tensors prevented by
    the rule's `skip` so far, as far as the host knows. `turned` counts the launches with a change of states' arrays.
    """

    def __init__(self, arrays: Arrays, hyper: HyperValues, processes: Processes, seed: int) -> None:
        self.arrays, self.hyper, self.processes, self.seed = arrays, hyper, processes, seed
        self.host = arrays.library("cpu", False)
        self.shared = SharedNumbers()
        self.largest = self.skipped = self.turned = 0
        self.device_skips = DeviceSkipCounter()
        self._scratch: dict[Any, Any] = {}
        self._stacks: dict[Any, list[Sequence[Any]]] = {}

    def scratch(self, slot: Any, like: Any, dtype: str) -> Any:
        """Memory for one step, like a parameter. The same slot, shape and dtype give the same memory again.

        The slot includes the device.
        """
        key = (slot, self.arrays.shape(like), dtype)
        memory = self._scratch.get(key)
        if memory is None:
            memory = self._scratch[key] = self.arrays.scratch(like, dtype)
        return memory

    def scratches(self, slot: Any, likes: Sequence[Any], dtype: str) -> list[Any]:
        """Memory for one step, like each of several parameters: for those of one shape one piece after the other."""
        alike: dict[Any, list[int]] = {}
        for place, like in enumerate(likes):
            plain = self.arrays.plain(like)
            alike.setdefault(self.arrays.shape(like) if plain else place, []).append(place)
        memory: dict[int, Any] = {}
        for shape, places in alike.items():
            first, count = likes[places[0]], len(places)
            if count == 1:
                memory[places[0]] = self.scratch((slot, places[0]), first, dtype)
            else:
                memory |= zip(places, self._pieces((slot, shape, dtype), first, dtype, count), strict=False)
        return [memory[place] for place in range(len(likes))]

    def _pieces(self, key: Any, like: Any, dtype: str, count: int) -> Sequence[Any]:
        """`count` pieces of memory or more. What was made once stays: captured graphs may use it."""
        known = self._stacks.setdefault(key, [])
        fitting = next((pieces for pieces in known if len(pieces) >= count), None)
        if fitting is None:
            fitting = self.arrays.scratches(like, dtype, count)
            known.append(fitting)
        return fitting

    def decoded(self, device: str, state: str, like: Any) -> Any:
        """Memory for a state in float32 during one kernel, in the shape and memory order of a parameter."""
        order = like.stride() if callable(getattr(like, "stride", None)) else like.strides
        return self.scratch(("decoded", device, state, order), like, "float32")
