"""Timing on a device, by turns: between two events, from idle to idle, and the host's time for a step."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.device import Device
from rulec.tools.compare.measure import Times, without_collection

Step = Callable[[], object]

#: How many times the last cache the inputs of successive calls fill, before the first come again.
PAST_CACHE = 4

#: At most so many sets of inputs, and rounds at least, whatever the time.
SETS, FEWEST = 64, 5

#: Of the time that the host takes to hand a call over, how much the device is held beforehand; seconds at most; and how
#: often that is doubled, where a call was handed over late.
_HOLD, _LONGEST_HOLD, _DOUBLED = 1.5, 0.2, 3


@dataclass(frozen=True)
class StepTimes(Times):
    """Seconds of one call of each contender, round by round, and the host's median time to hand a call over.

    `late` names the contenders with a call that was handed over later than the device was held: gaps between launches
    may be in their seconds.
    """

    host: Mapping[str, float] = field(default_factory=dict)
    late: Sequence[str] = ()

    def detail(self, above: str, below: str) -> dict[str, Any]:
        """The numbers behind a ratio, those of the host among them."""
        late = {"handed over later than the device was held": list(self.late)} if self.late else {}
        return {**super().detail(above, below), "host": dict(self.host), **late}


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
) -> StepTimes:  # fmt: skip
    """The device's time of each contender once a round, in an order that turns.

    A contender is one call, or as many as it has sets of inputs, which take turns too. The device is held until a call
    is handed over as a whole, as it is in training, where the host is ahead: for one and a half times the host's time,
    a fifth of a second at most. A call that is handed over late is made again, with the device held twice as long.
    No round is begun after `seconds`, but `FEWEST` are.
    """
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    with without_collection():
        host = {name: _warm(device, contenders[name], clock) for name in names}
        holds = {name: _Hold(device, host[name]) for name in names}
        begin = clock()
        for number in range(rounds):
            if number >= FEWEST and clock() - begin > seconds:
                break
            marks = {}
            for name in names[number % len(names) :] + names[: number % len(names)]:
                marks[name] = holds[name].sample(contenders[name][number % len(contenders[name])])
            device.synchronize()
            for name, pair in marks.items():
                samples[name].append(device.seconds(*pair))
    return StepTimes(samples, host, [name for name in names if holds[name].is_late])


#: The calls of each set before the first is timed: an optimizer's step is quicker once it has seen that steps repeat.
_WARM = 5


class _Hold:
    """How long the device is held before each call of a contender, which the host takes `host` seconds to hand over.

    `is_late` says whether the hold was too short for a call that counts.
    """

    def __init__(self, device: Device, host: float) -> None:
        self._device, self._doubled = device, 0
        self._seconds = min(_LONGEST_HOLD, _HOLD * host + 2e-5)
        self.is_late = False

    def sample(self, step: Step) -> tuple[object, object]:
        """The marks before and after a call that is handed over while the device is held, if it can be."""
        while True:
            _prepare(step)
            self._device.hold(self._seconds)
            first = self._device.mark()
            step()
            last = self._device.mark()
            if not self._device.passed(first):
                return first, last
            if self._doubled == _DOUBLED or self._seconds >= _LONGEST_HOLD:
                self.is_late = True
                return first, last
            self._doubled += 1
            self._seconds = min(_LONGEST_HOLD, 2 * self._seconds)


def _warm(device: Device, steps: Sequence[Step], clock: Callable[[], float]) -> float:
    """The host's seconds for a call on an idle device, after `_WARM` calls of every set."""
    for step in [*steps] * _WARM:
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
    return statistics.median(samples)


def idle_times(
    device: Device, contenders: Mapping[str, Step], rounds: int, seconds: float = 10.0,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTimes:  # fmt: skip
    """The time of each contender from an idle device to an idle device, by turns, on the clock of the host.

    This is the larger of the host's time and the device's, where a step has little to overlap. No round is begun after
    `seconds`, but `FEWEST` are.
    """
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    handed: dict[str, list[float]] = {name: [] for name in names}
    with without_collection():
        for name in names:
            _warm(device, [contenders[name]], clock)
        begin = clock()
        for number in range(rounds):
            if number >= FEWEST and clock() - begin > seconds:
                break
            for name in names[number % len(names) :] + names[: number % len(names)]:
                first = clock()
                contenders[name]()
                handed[name].append(clock() - first)
                device.synchronize()
                samples[name].append(clock() - first)
    return StepTimes(samples, {name: statistics.median(each) for name, each in handed.items()})


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
