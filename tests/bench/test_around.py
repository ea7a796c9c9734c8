"""What a step does around its kernels, on a step whose parts are known."""

from __future__ import annotations

import time

import pytest

from rulec.bench.around import time_around, timed_calls


class Kernel:
    """Stands for a call of a kernel that takes ten milliseconds."""

    def __call__(self, stage: int, fail: bool = False) -> int:
        time.sleep(0.01)
        if fail:
            raise ValueError
        return stage


def test_time_inside_calls_does_not_count() -> None:
    kernel = Kernel()

    def step() -> None:
        kernel(0)
        time.sleep(0.002)
        kernel(1)

    assert 0.002 <= time_around(step, Kernel, 3) < 0.01


def test_calls_do_what_they_did_and_are_left_as_they_were() -> None:
    before = Kernel.__call__
    with timed_calls(Kernel) as clock:
        assert Kernel()(7) == 7
        with pytest.raises(ValueError):  # noqa: PT011
            Kernel()(0, fail=True)
        assert clock.seconds >= 0.02
    assert Kernel.__call__ is before
