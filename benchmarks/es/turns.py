"""Timing by turns of calls with preparations before each of them, for as long as there is time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rulec.tools.compare.measure import Times, without_collection

#: Rounds that are taken even when there is no time for them.
FEWEST = 3


@dataclass(frozen=True)
class Turn:
    """A contender: `call` is timed; `before` is called ahead of it, untimed."""

    call: Callable[[], object]
    before: Callable[[], object] = lambda: None


def by_turns(
    contenders: Mapping[str, Turn], rounds: int, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Times:
    """Times every contender once a round, in an order that turns; the first round does not count.

    Rounds end after `rounds`, or when `seconds` are over and `FEWEST` were taken. Calls are of milliseconds or more:
    each is a sample.
    """
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    begin = clock()
    with without_collection():
        for number in range(-1, rounds):
            if number >= FEWEST and clock() - begin > seconds:
                break
            for name in names[number % len(names) :] + names[: number % len(names)]:
                taken = _once(contenders[name], clock)
                if number >= 0:
                    samples[name].append(taken)
    return Times(samples)


def _once(turn: Turn, clock: Callable[[], float]) -> float:
    turn.before()
    start = clock()
    turn.call()
    return clock() - start
