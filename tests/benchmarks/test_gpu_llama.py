"""Training steps of a Llama on a GPU, on the processor with a tiny one: memory against what is said, and time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu import llama as gpu_llama
from benchmarks.gpu.device import Bench
from benchmarks.result import Row
from rulec.tools.compare.measure import Times
from tests.benchmarks.gpu_fakes import HostDevice


@pytest.fixture
def bench() -> Bench:
    return Bench(True, HostDevice())


def rows(found: Any) -> dict[str, Row]:
    return {row.measure: row for row in found}


def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of no weight."""
    monkeypatch.setattr(gpu_llama, "_taken", lambda bench, rule, way: gpu_llama.Taken(way, lambda: None))


@pytest.mark.parametrize(("way", "target"), [("eager", 1.02), ("epilogue", 1.0)])
def test_memory_and_time_are_judged(way: Any, target: float, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {way: 1.01, "deferred": 1.0, gpu_llama.FUSED: 2.0}
    taken(monkeypatch)
    monkeypatch.setattr(gpu_llama, "peak_of", lambda bench, make: {way: 980, gpu_llama.FUSED: 1960}[make().model])
    monkeypatch.setattr(gpu_llama, "said", lambda *_: {"peak": 1000})
    monkeypatch.setattr(gpu_llama, "timed", lambda device, contenders, *_: Times({n: [seconds[n]] for n in contenders}))
    found = rows(gpu_llama.steps(bench, "apollo", way))
    away = found["peak of memory, away from what rulec memory says"]
    assert away.value == pytest.approx(0.02)
    assert (away.target, away.sense, away.met) == (0.03, "at most", True)
    assert away.detail == {"peak": 980, "said": {"peak": 1000}}
    assert found["peak of memory, times that of torch's fused AdamW"].value == 0.5
    time = found["time of a step, times that of deferred"]
    assert (time.value, time.target, time.met) == (1.01, target, way == "eager")
    assert found["time of a step, times that of torch's fused AdamW"].value == pytest.approx(0.505)
    assert time.subject == f"apollo in bfloat16, a tiny Llama, 16 tokens: {way}"


def test_memory_that_is_less_than_said_is_away_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    taken(monkeypatch)
    monkeypatch.setattr(gpu_llama, "peak_of", lambda bench, make: 900)
    monkeypatch.setattr(gpu_llama, "said", lambda *_: {"peak": 1000})
    monkeypatch.setattr(gpu_llama, "timed", lambda device, contenders, *_: Times({n: [1.0] for n in contenders}))
    found = rows(gpu_llama.steps(bench, "adamw", "deferred"))
    assert found["peak of memory, away from what rulec memory says"].met is False
    assert "time of a step, times that of deferred" not in found


def test_the_peak_is_of_a_step_that_comes_after_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory from before the model does not count, nor does memory that only the first steps need."""
    calls: list[str] = []
    monkeypatch.setattr(gpu_llama, "memory_now", lambda bench: 100)
    monkeypatch.setattr(gpu_llama, "memory_reset", lambda bench: calls.append("reset"))
    monkeypatch.setattr(gpu_llama, "memory_peak", lambda bench: 350)
    made = gpu_llama.Taken(None, lambda: calls.append("step"))
    assert gpu_llama.peak_of(bench, lambda: made) == 250
    assert calls == ["step", "step", "step", "reset", "step"]


@pytest.mark.parametrize("rule", gpu_llama.RULES)
def test_every_way_takes_the_same_steps(rule: str, bench: Bench) -> None:
    """After two steps from the same start weights are the same, bit for bit, in ours, and near in torch's."""
    ended: dict[str, list[Any]] = {}
    for way in ("deferred", "eager", gpu_llama.FUSED, gpu_llama.HOOKS):
        torch.manual_seed(0)
        one = gpu_llama._taken(bench, rule, way)
        start = [p.detach().clone() for p in one.model.parameters()]
        for _ in range(3):
            one.step()
        ended[way] = [p.detach().clone() for p in one.model.parameters()]
        assert any(not torch.equal(a, b) for a, b in zip(start, ended[way], strict=True)), way
    assert all(torch.equal(a, b) for a, b in zip(ended["deferred"], ended["eager"], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(ended[gpu_llama.FUSED], ended[gpu_llama.HOOKS], strict=True))


def test_what_is_said_is_what_rulec_memory_says(bench: Bench) -> None:
    counted = gpu_llama.said(bench, "adamw", "deferred")
    model = gpu_llama._taken(bench, "adamw", "deferred").model
    weights = sum(p.nbytes for p in model.parameters())
    assert counted["at_peak"]["weights"] == weights
    assert counted["peak"] >= 4 * weights
    eager = gpu_llama.said(bench, "adamw", "eager")
    assert eager["without_activations"] < counted["without_activations"]


def test_the_model_has_a_billion_weights() -> None:
    from rulec.torch.memory_profile.models import Transformer

    with torch.device("meta"):
        model = Transformer(gpu_llama.LLAMA)
    assert sum(p.numel() for p in model.parameters()) == 1_100_048_384


def test_parts_are_of_each_rule_in_each_way() -> None:
    assert len(gpu_llama.parts(())) == 7
    assert [part.arguments for part in gpu_llama.parts(("apollo",))] == [
        ("apollo", "deferred"), ("apollo", "eager"), ("apollo", "epilogue"),
    ]  # fmt: skip
    assert gpu_llama.parts(("lion",)) == []


def test_torchs_hooks_are_measured_without_targets(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    taken(monkeypatch)
    seconds = {gpu_llama.HOOKS: 3.0, gpu_llama.FUSED: 2.0}
    monkeypatch.setattr(gpu_llama, "timed", lambda device, contenders, *_: Times({n: [seconds[n]] for n in contenders}))
    peak, time = gpu_llama.hooked(bench)
    assert isinstance(peak, Row)
    assert isinstance(time, Row)
    assert (peak.target, time.target, time.value) == (None, None, 1.5)
