"""Timing by turns, with contenders whose turns can be seen."""

from __future__ import annotations

import gc
import time

import pytest

from rulec.tools.compare.measure import SHORTEST_SAMPLE, Times, interleaved


def test_contenders_take_turns_and_the_order_turns() -> None:
    seen: list[str] = []

    def contender(name: str) -> None:
        seen.append(name)
        time.sleep(SHORTEST_SAMPLE)

    rounds: list[int] = []
    times = interleaved({n: (lambda n=n: contender(n)) for n in "ab"}, 4, lambda: rounds.append(len(seen)))
    assert [len(samples) for samples in times.seconds.values()] == [4, 4]
    # After the calls that find out how long each is, a round of warm-up and four that count, each of both.
    assert seen[-8:] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert len(rounds) == 5


def test_a_short_contender_is_called_often_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a call moves by a microsecond."""
    calls = 0
    monkeypatch.setattr("rulec.tools.compare.measure.time.perf_counter", lambda: calls * 1e-6)

    def short() -> None:
        nonlocal calls
        calls += 1

    times = interleaved({"short": short}, 2)
    assert calls > 2 * SHORTEST_SAMPLE / 1e-6
    assert times.median("short") == pytest.approx(1e-6)


def test_medians_and_ratios() -> None:
    times = Times({"a": [1.0, 2.0, 9.0], "b": [1.0, 1.0, 4.0]})
    assert times.median("a") == 2.0
    assert times.ratio("a", "b") == 2.0
    assert times.quartiles("a", "b") == (1.5, 2.125)
    # The machine slowed down twentyfold on the way, for both: 10 would be the ratio of the medians.
    assert Times({"a": [1.0, 10.0, 20.0], "b": [1.0, 1.0, 20.0]}).ratio("a", "b") == 1.0
    assert Times({"a": [3.0], "b": [2.0]}).quartiles("a", "b") == (1.5, 1.5)


def test_no_garbage_is_collected_within_a_round_and_the_collector_is_left_as_it_was() -> None:
    enabled: list[bool] = []
    interleaved({"a": lambda: enabled.append(gc.isenabled())}, 1)
    assert not any(enabled)
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        interleaved({"a": lambda: 1 / 0}, 1)
    assert gc.isenabled()


def test_a_settled_contender_is_called_once_before_its_sample() -> None:
    calls: list[str] = []

    def contender(name: str) -> None:
        calls.append(name)
        time.sleep(0.003)

    interleaved({n: (lambda n=n: contender(n)) for n in "ab"}, 2, settled=True)
    assert "".join(calls[-8:]) in ("aabbbbaa", "bbaaaabb")
