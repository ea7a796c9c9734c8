"""Timing by marks: turns, sets of inputs past the cache, and limits, on a device whose time is made up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.gpu.time import FEWEST, SETS, StepTimes, host_times, idle_times, sets_past, timed
from tests.benchmarks.gpu_fakes import Clock, HostDevice


class CountedDevice(HostDevice):
    """A device whose clock goes on by what its calls take."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.waits = 0

    def mark(self) -> float:
        return self.now

    def synchronize(self) -> None:
        self.waits += 1


def taking(device: CountedDevice, log: list[str], name: str, seconds: float) -> Callable[[], object]:
    def step() -> None:
        log.append(name)
        device.now += seconds

    return step


def test_contenders_take_turns_and_so_do_their_sets() -> None:
    device, log = CountedDevice(), list[str]()
    ours = [taking(device, log, f"a{i}", 2.0 + i) for i in range(2)]
    times = timed(device, {"a": ours, "b": [taking(device, log, "b", 1.0)]}, 4, clock=Clock())
    assert log[-8:] == ["a0", "b", "b", "a1", "a0", "b", "b", "a1"]
    assert times.seconds == {"a": [2.0, 3.0, 2.0, 3.0], "b": [1.0] * 4}
    assert times.ratio("a", "b") == 2.5


def test_the_device_is_held_while_a_call_is_handed_over() -> None:
    device, clock = CountedDevice(), Clock()

    def slow() -> None:
        clock.now += 0.002

    steps = {"slow": [slow], "long": [lambda: setattr(clock, "now", clock.now + 0.1)]}
    timed(device, steps, 2, clock=clock)
    assert sorted(device.held) == pytest.approx([0.00302, 0.00302, 0.15002, 0.15002])


class HeldDevice(HostDevice):
    """A device that passes its first mark after a hold once the hold is over, by the clock of its owner."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.until = clock, 0.0

    def hold(self, seconds: float) -> None:
        super().hold(seconds)
        self.until = self.clock.now + seconds

    def mark(self) -> float:
        return self.until

    def passed(self, mark: float) -> bool:
        return self.clock.now > mark


def handed_over(clock: Clock, *seconds: float) -> Callable[[], object]:
    """A call that takes the host so many seconds, the last of them from then on."""
    left = [*seconds]

    def call() -> None:
        clock.now += left.pop(0) if len(left) > 1 else left[0]

    return call


def test_a_call_that_was_handed_over_late_is_made_again_with_the_device_held_twice_as_long() -> None:
    clock = Clock()
    device = HeldDevice(clock)
    warm = [0.001] * 8  # five calls before the first is timed, and three for the host's time
    steps = {"cold": [handed_over(clock, *warm, 0.005)], "usual": [handed_over(clock, 0.001)]}
    times = timed(device, steps, 2, clock=clock)
    assert device.held == pytest.approx([0.00152, 0.00304, 0.00608, 0.00152, 0.00152, 0.00608])
    assert (times.late, [len(each) for each in times.seconds.values()]) == ([], [2, 2])


def test_a_call_that_is_always_handed_over_late_is_named() -> None:
    clock = Clock()
    device = HeldDevice(clock)
    warm = [0.001] * 8
    waits = {"long": [0.19], "longest": [0.3], "grows": [*warm, 0.15]}
    steps = {name: [handed_over(clock, *wait)] for name, wait in waits.items()}
    times = timed(device, steps, 1, clock=clock)
    assert device.held == pytest.approx([0.2, 0.2, *(0.00152 * 2**i for i in range(4))])
    assert times.late == ["longest", "grows"]
    seconds = StepTimes({"a": [1.0], "b": [2.0]}, {"a": 0.1, "b": 0.3}, ["b"])
    assert seconds.detail("a", "b") == {
        "a": 1.0, "b": 2.0, "scatter": (0.5, 0.5), "host": {"a": 0.1, "b": 0.3},
        "handed over later than the device was held": ["b"],
    }  # fmt: skip
    assert "handed over later than the device was held" not in StepTimes({"a": [1.0], "b": [2.0]}).detail("a", "b")


class Behind(HostDevice):
    """A device that is done with a call some time after the host, as its owner's clock has it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.left = clock, 0.0

    def synchronize(self) -> None:
        self.clock.now += self.left
        self.left = 0.0


def test_idle_to_idle_is_the_time_until_the_device_is_done_and_the_hosts_is_less() -> None:
    clock = Clock()
    device = Behind(clock)

    def step(host: float, more: float) -> Callable[[], object]:
        def call() -> None:
            clock.now += host
            device.left += more

        return call

    times = idle_times(device, {"a": step(1.0, 3.0), "b": step(2.0, 0.5)}, 3, clock=clock)
    assert times.seconds == {"a": [4.0] * 3, "b": [2.5] * 3}
    assert (times.host, times.late) == ({"a": 1.0, "b": 2.0}, ())
    assert device.held == []
    assert len(idle_times(device, {"a": step(1.0, 3.0)}, 100, 9.0, clock).seconds["a"]) == FEWEST


def test_rounds_end_with_the_time_but_some_are_taken() -> None:
    device, clock = CountedDevice(), Clock()

    def slow() -> None:
        clock.now += 3.0
        device.now += 0.5

    assert len(timed(device, {"slow": [slow]}, 100, 10.0, clock).seconds["slow"]) == FEWEST
    assert len(timed(device, {"slow": [slow]}, 100, 30.0, clock).seconds["slow"]) == 11


def test_sets_fill_the_cache_several_times() -> None:
    assert sets_past(50 * 2**20, 400 * 2**20) == 1
    assert sets_past(50 * 2**20, 16_000_000) == 14
    assert sets_past(50 * 2**20, 4) == SETS
    assert sets_past(50 * 2**20, 0) == SETS


def test_the_hosts_time_is_of_the_call_alone() -> None:
    device, clock = CountedDevice(), Clock()

    def before() -> None:
        clock.now += 100.0

    steps = {
        "a": lambda: setattr(clock, "now", clock.now + 2.0),
        "b": lambda: setattr(clock, "now", clock.now + 1.0),
    }
    times = host_times(device, steps, 3, before=before, clock=clock)
    assert times.seconds == {"a": [2.0] * 3, "b": [1.0] * 3}
    assert device.waits == 2 * (3 + 2)  # before each sample, so that no queue is full
