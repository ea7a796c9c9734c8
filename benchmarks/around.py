"""The time of a step around its kernels: the whole step less the time inside the calls of kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Clock:
    """Seconds spent inside calls so far."""

    seconds: float = 0.0


@contextmanager
def timed_calls(kind: Any) -> Iterator[Clock]:
    """Within the block, every call of objects of the class `kind` is timed by the clock."""
    clock, plain = Clock(), kind.__call__

    def timed(self: Any, *args: Any, **keywords: Any) -> Any:
        begin = time.perf_counter()
        try:
            return plain(self, *args, **keywords)
        finally:
            clock.seconds += time.perf_counter() - begin

    kind.__call__ = timed
    try:
        yield clock
    finally:
        kind.__call__ = plain


def time_around(step: Callable[[], object], kind: Any, rounds: int) -> float:
    """The median seconds of a step without its kernels' calls; the calls are of objects of the class `kind`.

    Both times are of the same steps, so the time of the kernels cancels out.
    """
    samples = []
    with timed_calls(kind) as clock:
        for number in range(-2, rounds):
            clock.seconds = 0.0
            begin = time.perf_counter()
            step()
            total = time.perf_counter() - begin
            if number >= 0:
                samples.append(total - clock.seconds)
    return statistics.median(samples)
