"""What a step does around its kernels, on a step whose parts are known, by a clock that they move."""

from __future__ import annotations

import pytest

from benchmarks import around
from benchmarks.around import time_around, timed_calls


class Time:
    """Stands for the module: seconds pass when one sleeps."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(around, "time", time)
    return time


class Kernel:
    """Stands for a kernel that takes ten seconds."""

    def __init__(self, time: Time) -> None:
        self.time = time

    def launch(self, stage: int, fail: bool = False) -> int:
        self.time.sleep(10.0)
        if fail:
            raise ValueError
        return stage


def test_time_inside_calls_does_not_count(time: Time) -> None:
    kernel = Kernel(time)

    def step() -> None:
        kernel.launch(0)
        time.sleep(2.0)
        kernel.launch(1)

    assert time_around(lambda: step, Kernel, 3) == 2.0


def test_calls_do_what_they_did_and_are_left_as_they_were(time: Time) -> None:
    before = Kernel.launch
    with timed_calls(Kernel) as clock:
        assert Kernel(time).launch(7) == 7
        with pytest.raises(ValueError):  # noqa: PT011
            Kernel(time).launch(0, fail=True)
        assert clock.seconds == 20.0
    assert Kernel.launch is before
