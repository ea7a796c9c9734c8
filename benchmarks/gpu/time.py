"""Timing on a device, by turns: the device's time between two events, and the host's time for a step."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.gpu.device import Device
from rulec.compare.interleave import Times, without_collection

Step = Callable[[], object]

#: How many times the last cache the inputs of successive calls fill, before the first come again.
PAST_CACHE = 4

#: At most so many sets of inputs, and rounds at least, whatever the time.
SETS, FEWEST = 64, 5

#: Of the time that the host takes to hand a call over, how much the device is held beforehand, and seconds at most.
_HOLD, _LONGEST_HOLD = 1.5, 0.03


@dataclass(frozen=True)
class Prepared:
    """A step with what is called before each of its calls, untimed."""

    step: Step
    before: Step

    def __call__(self) -> object:
        """The step alone."""
        return self.step()


def _prepare(step: Step) -> None:
    if isinstance(step, Prepared):
        step.before()


def sets_past(cache: int, of_one: int) -> int:
    """The number of sets of inputs, of `of_one` bytes each, so that none is still in the cache when it recurs."""
    return max(1, min(SETS, -(-PAST_CACHE * cache // max(1, of_one))))


def timed(
    device: Device, contenders: Mapping[str, Sequence[Step]], rounds: int, seconds: float = 10.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:  # fmt: skip
    """The device's time of each contender once a round, in an order that turns.

    A contender is one call, or as many as it has sets of inputs, which take turns too. The device is held until a call
    is handed over as a whole, as it is in training, where the host is ahead. No round is begun after `seconds`, but
    `FEWEST` are.
    """
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    with without_collection():
        holds = {name: _warm(device, contenders[name], clock) for name in names}
        begin = clock()
        for number in range(rounds):
            if number >= FEWEST and clock() - begin > seconds:
                break
            marks = {}
            for name in names[number % len(names) :] + names[: number % len(names)]:
                step = contenders[name][number % len(contenders[name])]
                marks[name] = _sample(device, step, holds[name])
            device.synchronize()
            for name, pair in marks.items():
                samples[name].append(device.seconds(*pair))
    return Times(samples)


def _sample(device: Device, step: Step, hold: float) -> tuple[object, object]:
    _prepare(step)
    device.hold(hold)
    first = device.mark()
    step()
    return first, device.mark()


def _warm(device: Device, steps: Sequence[Step], clock: Callable[[], float]) -> float:
    """The seconds for which the device is held before one call; calls every set twice."""
    for step in (*steps, *steps):
        _prepare(step)
        step()
    samples = []
    for step in [*steps, *steps, *steps][:3]:
        _prepare(step)
        device.synchronize()
        begin = clock()
        step()
        samples.append(clock() - begin)
    device.synchronize()
    return min(_LONGEST_HOLD, _HOLD * statistics.median(samples) + 2e-5)


def host_times(
    device: Device, contenders: Mapping[str, Step], rounds: int, calls: int = 5, before: Step | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:  # fmt: skip
    """The host's time for a call of each contender, by turns: a few calls on an idle device.

    `before` is called before each call, untimed.
    """
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    with without_collection():
        for number in range(-2, rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                sample = _host_sample(device, contenders[name], calls, before, clock)
                if number >= 0:
                    samples[name].append(sample)
            gc.collect(0)
    return Times(samples)


def _host_sample(
    device: Device, step: Step, calls: int, before: Step | None, clock: Callable[[], float]
) -> float:  # fmt: skip
    spent = 0.0
    device.synchronize()
    for _ in range(calls):
        if before is not None:
            before()
        begin = clock()
        step()
        spent += clock() - begin
    return spent / calls
