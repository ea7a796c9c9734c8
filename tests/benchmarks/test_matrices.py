"""`rulec bench matrices`: Muon and its products, Apollo's state, and the rules that decompose."""

from __future__ import annotations

import pytest
import torch

from benchmarks import matrices, peers
from benchmarks.suite import measurement


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "QUICK_MUON", ((2, (8, 8)), (1, (16, 8))))
    monkeypatch.setattr(matrices, "QUICK_DECOMPOSED", (1, (6, 4)))
    monkeypatch.setattr(matrices, "QUICK_ROUNDS", 1)
    monkeypatch.setattr(matrices, "STATE_SHAPES", ((400, 500),))


def test_muon() -> None:
    result = matrices.measure(True, ["muon"])
    assert [row.what for row in result.rows] == [
        f"muon, {size}: {measure}"
        for size in ("2 matrices of 8 by 8", "1 matrix of 16 by 8")
        for measure in (matrices.FASTER, matrices.SHARE)
    ]
    faster, share = result.rows[:2]
    assert (faster.target, faster.sense, share.target, share.sense) == (1.0, "at least", 0.15, "at most")
    assert faster.value == pytest.approx(faster.detail["torch"] / faster.detail["step"])
    assert share.value == pytest.approx(1 - share.detail["products"] / share.detail["step"])


def test_muon_without_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    result = matrices.measure(True, ["muon"])
    assert {row.measure for row in result.rows} == {matrices.SHARE}
    assert any("torch.optim.Muon" in note for note in result.notes)


def test_the_state_of_apollo_and_of_adamw() -> None:
    apollo, adamw = matrices.measure(True, ["apollo"]).rows
    assert apollo.subject == "apollo of rank 4, one of 400 by 500"
    # Two moments of 4 by 500, and a few numbers.
    assert apollo.value == pytest.approx(2 * 4 * 500 / (400 * 500), rel=0.01)
    assert (apollo.target, apollo.met, adamw.target) == (0.05, True, None)
    assert adamw.value == pytest.approx(2, rel=0.01)


def test_rules_that_decompose(monkeypatch: pytest.MonkeyPatch) -> None:
    result = matrices.measure(True, ["soap", "shampoo"])
    assert [row.what for row in result.rows] == [
        "soap, 1 matrix of 6 by 4: step, times as fast as pytorch_optimizer.SOAP",
        "shampoo, 1 matrix of 6 by 4: step, times as fast as pytorch_optimizer.Shampoo",
    ]
    assert all(row.target == matrices.OF_OTHERS and row.value > 0 for row in result.rows)
    monkeypatch.setattr(peers, "_CLASSES", {})
    result = matrices.measure(True, ["soap"])
    assert (result.rows, len(result.notes)) == ([], 1)


def test_every_part_ticks() -> None:
    ticks: list[None] = []
    matrices.measure(True, [], lambda: ticks.append(None))
    assert len(ticks) == measurement("matrices", True).parts == 5
    assert measurement("matrices", True, ["lamb"]).parts == 0
