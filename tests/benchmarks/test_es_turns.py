"""Timing by turns with something done before each call, by a clock that the contenders move."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.es.turns import FEWEST, Turn, by_turns


class Clock:
    """Seconds that pass when one says so."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, list[str]()

    def __call__(self) -> float:
        return self.now

    def taking(self, name: str, *seconds: float) -> Callable[[], object]:
        """A call that takes so long, one after the other, the last again and again."""
        left = list(seconds)

        def call() -> None:
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


def test_contenders_take_turns_and_the_first_round_does_not_count() -> None:
    clock = Clock()
    turns = {"a": Turn(clock.taking("a", 100.0, 2.0, 6.0, 2.0)), "b": Turn(clock.taking("b", 50.0, 1.0))}
    times = by_turns(turns, 3, 1e9, clock)
    assert clock.log == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert times.seconds == {"a": [2.0, 6.0, 2.0], "b": [1.0, 1.0, 1.0]}
    assert times.ratio("a", "b") == 2.0


def test_what_is_done_before_is_not_timed() -> None:
    clock = Clock()
    times = by_turns({"a": Turn(clock.taking("a", 2.0), before=clock.taking("before", 30.0))}, 2, 1e9, clock)
    assert times.seconds == {"a": [2.0, 2.0]}
    assert clock.log == ["before", "a"] * 3


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, FEWEST), (3.5, FEWEST), (5.5, 5), (1e9, 20)])
def test_rounds_end_with_the_time_but_some_are_taken(seconds: float, rounds: int) -> None:
    """The round that does not count takes its second too."""
    clock = Clock()
    assert len(by_turns({"a": Turn(clock.taking("a", 1.0))}, 20, seconds, clock).seconds["a"]) == rounds
