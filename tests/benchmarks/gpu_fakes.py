"""A device that is the processor, and a crew that is a script: what drives the measurement where there is no GPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.gpu.part import Part
from benchmarks.gpu.run import Ended, Message, Started


class HostDevice:
    """The processor: work is done when it is handed over."""

    name = "cpu"

    def __init__(self, free: int = 2**40, cache: int = 1024) -> None:
        self.free, self.cache = free, cache
        self.broken = False
        self.held: list[float] = []

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, first: float, last: float) -> float:
        return last - first

    def passed(self, mark: float) -> bool:
        return False

    def hold(self, seconds: float) -> None:
        self.held.append(seconds)

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def free_bytes(self) -> int:
        return self.free

    def cache_bytes(self) -> int:
        return self.cache

    def release(self) -> None:
        pass


class Clock:
    """Seconds that pass when a script says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


#: What a worker does with a part: seconds until it says something, and what.
Script = list[tuple[float, Message]]


class ScriptedCrew:
    """Workers that say what a script has for their part, when it says so. A part without a script ends at once."""

    def __init__(self, size: int, clock: Clock, scripts: dict[str, Script] | None = None) -> None:
        self.size, self.clock, self.scripts = size, clock, scripts or {}
        self.given: list[tuple[float, int, str]] = []
        self.ended: list[tuple[float, int]] = []
        self._due: dict[int, deque[tuple[float, Message]]] = {}

    def give(self, worker: int, part: Part) -> None:
        assert worker not in self._due, "the worker is at another part"
        self.given.append((self.clock.now, worker, part.name))
        script = self.scripts.get(part.name, [(0.0, Started()), (1.0, Ended())])
        at = self.clock.now
        due: list[tuple[float, Message]] = []
        for seconds, message in script:
            at += seconds
            due.append((at, message))
        self._due[worker] = deque(due)

    def wait(self, seconds: float) -> Iterable[tuple[int, Message]]:
        until = self.clock.now + seconds
        waiting = {w: due[0][0] for w, due in self._due.items() if due}
        soonest = min(waiting.values(), default=until)
        self.clock.now = max(self.clock.now, min(soonest, until))
        return list(self._said(waiting))

    def _said(self, waiting: dict[int, float]) -> Iterator[tuple[int, Message]]:
        for worker, at in waiting.items():
            if at <= self.clock.now:
                _, message = self._due[worker].popleft()
                if isinstance(message, Ended):
                    del self._due[worker]
                yield worker, message

    def end(self, worker: int) -> None:
        self.ended.append((self.clock.now, worker))
        del self._due[worker]


def nothing(*_: Any) -> Iterator[Any]:
    """A part's work that finds nothing."""
    yield from ()
