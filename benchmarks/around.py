"""The time of a step around its kernels: the whole step less the time inside the calls of kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

#: The steps before a step is as those after it.
_FIRST = 4


@dataclass
class Clock:
    """Seconds spent inside calls so far."""

    seconds: float = 0.0


@contextmanager
def timed_calls(kind: Any) -> Iterator[Clock]:
    """Within the block, every launch by objects of the class `kind` is timed by the clock."""
    clock, plain = Clock(), kind.launch

    def timed(self: Any, *args: Any, **keywords: Any) -> Any:
        begin = time.perf_counter()
        try:
            return plain(self, *args, **keywords)
        finally:
            clock.seconds += time.perf_counter() - begin

    kind.launch = timed
    try:
        yield clock
    finally:
        kind.launch = plain


def time_around(make: Callable[[], Callable[[], object]], kind: Any, rounds: int) -> float:
    """The median seconds of a step without its kernels; objects of the class `kind` launch them.

    `make` gives the step. Both times are of the same steps, so the time of the kernels cancels out.
    """
    samples = []
    with timed_calls(kind) as clock:
        step = make()
        for number in range(-_FIRST, rounds):
            clock.seconds = 0.0
            begin = time.perf_counter()
            step()
            total = time.perf_counter() - begin
            if number >= 0:
                samples.append(total - clock.seconds)
    return statistics.median(samples)
