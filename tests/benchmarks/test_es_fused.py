"""Rows of noise that is made in the rule's kernel: of the same step, and put together from scripted times."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.es import fused as es_fused
from benchmarks.es.fused import GRADIENT, OURS, TORCH, Steps, elements_of, plan, rows, summed
from benchmarks.es.turns import Turn
from rulec.tools.compare.measure import Times


class Standing:
    """Stands for the steps: they are counted."""

    def __init__(self, rule: str, values: str, directions: int, elements: int) -> None:
        self.elements, self.done = elements, list[str]()

    def fused(self) -> None:
        self.done.append("fused")

    def fill(self) -> None:
        self.done.append("fill")

    def ours(self) -> None:
        self.done.append("ours")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every contender runs once, and has then taken the seconds written here."""
    seconds = {"fused": [3.0, 3.0], "fill": [2.0, 2.0], "ours": [2.0, 4.0], "torch": [4.0, 10.0]}

    def by_turns(contenders: dict[str, Turn], rounds: int, limit: float) -> Times:
        for turn in contenders.values():
            turn.call()
        return Times({name: seconds[name] for name in contenders})

    monkeypatch.setattr(es_fused, "by_turns", by_turns)
    monkeypatch.setattr(es_fused, "Steps", Standing)
    monkeypatch.setattr(es_fused, "QUICK_ELEMENTS", 10_000)
    monkeypatch.setattr(es_fused, "peak_growth", lambda work: work() or 20_000)


@pytest.mark.slow
def test_both_ways_are_the_same_step() -> None:
    step = Steps("adamw", "popcount", 3, 1000)
    step.fused()
    step.fill()
    step.ours()
    fused, ours = step.params
    np.testing.assert_array_equal(fused, ours)
    assert len(np.unique(fused)) > 10


def test_rows_of_a_rule_that_torch_has(scripted: None) -> None:
    ours, theirs, grown = rows("adamw", "popcount", 1, True)
    assert (ours.what, ours.target, ours.sense) == (f"adamw, popcount, 1 direction: {OURS}", 0.7, "at most")
    assert ours.value == pytest.approx((3 / 4 + 3 / 6) / 2)
    assert (theirs.measure, theirs.value) == (TORCH, pytest.approx((3 / 6 + 3 / 12) / 2))
    assert (grown.measure, grown.value, grown.target) == (GRADIENT, 2.0, 0.25)
    assert ours.detail["elements"] == 10_000


def test_rows_of_a_rule_that_torch_has_not(scripted: None) -> None:
    (row,) = rows("lion", "rademacher", 16, True)
    assert (row.subject, row.measure, row.target) == ("lion, rademacher, 16 directions", OURS, 1.0)


def test_times_of_two_kernels_are_added_round_by_round() -> None:
    times = summed(Times({"fused": [1.0, 1.0], "fill": [1.0, 2.0], "ours": [3.0, 1.0]}), "ours")
    assert times.seconds["both"] == [4.0, 3.0]


def test_the_plan() -> None:
    assert len(plan()) == 27
    assert plan(["lion"])[0] == ("lion", "popcount", 1)
    assert elements_of("normal", 64, False) == elements_of("normal", 1, False) / 10 == 5_000_000
