"""Training steps on the host beside a GPU, on the processor with a tiny Llama: memory, and time beside its needs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu import llama as gpu_llama
from benchmarks.gpu import offload as gpu_offload
from benchmarks.gpu.device import Bench
from benchmarks.result import Row
from rulec.tools.compare.measure import Times
from tests.benchmarks.gpu_fakes import HostDevice


@pytest.fixture
def bench() -> Bench:
    return Bench(True, HostDevice())


def test_a_step_is_held_against_the_longest_of_its_needs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_llama, "peak_of", lambda bench, make: 980)
    monkeypatch.setattr(gpu_offload, "said", lambda *_: {"peak": 1000})
    monkeypatch.setattr(gpu_offload, "needed", lambda *_: {"link": 1.5, "host": 0.5})
    seconds = {"step": 1.65, "passes": 1.2}
    given: Any = lambda device, contenders, *_: Times({n: [seconds[n]] for n in contenders})  # noqa: E731
    monkeypatch.setattr(gpu_offload, "timed", given)
    found = {row.measure: row for row in gpu_offload.steps(bench, "adamw") if isinstance(row, Row)}
    assert found[gpu_llama.SAID].value == pytest.approx(0.02)
    row = found[gpu_offload.TIME]
    assert (row.value, row.target, row.met) == (pytest.approx(1.1), 1.15, True)
    assert row.detail == {"step": 1.65, "passes": 1.2, "link": 1.5, "host": 0.5}


@pytest.mark.parametrize("rule", gpu_offload.RULES)
def test_a_tiny_llama_takes_its_steps_and_its_needs_are_measured(rule: str, bench: Bench) -> None:
    taken = gpu_offload.taken(bench, rule)
    before = [param.detach().clone() for param in taken.model.parameters()]
    for _ in range(2):
        taken.step()
    assert any((param != old).any() for param, old in zip(taken.model.parameters(), before, strict=True))
    assert all(param.dtype == old.dtype for param, old in zip(taken.model.parameters(), before, strict=True))
    gpu_offload.passes(bench, taken.model)()
    assert all(seconds > 0 for seconds in gpu_offload.needed(bench, rule, taken.model).values())
    account, weights = gpu_offload.said(bench, rule), sum(param.nbytes for param in taken.model.parameters())
    assert weights < account["peak"] < 3 * weights + (1 << 20)


def test_the_chosen_rules_are_measured() -> None:
    assert [part.arguments for part in gpu_offload.parts(())] == [("adamw",), ("lion",)]
    assert gpu_offload.parts(("adafactor",)) == []
