"""The rows of training steps that `rulec bench memory` has, and their picture."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from benchmarks.memory import jax as memory_jax
from benchmarks.memory import steps as memory_steps
from benchmarks.memory.chart import bars_of, draw
from benchmarks.memory.steps import BESIDE, TIME, WEIGHTS, Model
from benchmarks.result import Result
from benchmarks.suite import measurement
from rulec.errors import RulecError
from rulec.torch.memory_profile.meter import rows
from rulec.torch.memory_profile.models import Linears
from tests.cli.running import error, run


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One model of four small layers, and none in JAX."""
    model = Model("4 linear layers", partial(Linears, 4, 64), rows(16, 64), 16)
    monkeypatch.setattr(memory_steps, "models", lambda quick: [model])
    monkeypatch.setattr(memory_jax, "models", lambda quick: [])


def test_rows_of_rules_and_ways(small: None) -> None:
    notes: list[str] = []
    ticks: list[None] = []
    found = memory_steps.measure(True, ["sgd", "adamw"], lambda: ticks.append(None), notes)
    figures = {(row.subject, row.measure): row for row in found}
    share = 1 / 4
    expected = {
        "sgd, deferred": 2.0, "sgd, eager": 1 + share, "adamw, deferred": 4.0, "adamw, eager": 3 + share,
    }  # fmt: skip
    for subject, value in expected.items():
        assert figures[f"4 linear layers, {subject}", WEIGHTS].value == pytest.approx(value, abs=1e-3)
    for rule in ("sgd", "adamw"):
        for way in ("eager", "epilogue"):
            row = figures[f"4 linear layers, {rule}, {way}", BESIDE]
            assert (row.target, row.sense, row.met) == (1.05, "at most", True)
            assert row.value == pytest.approx(1, abs=0.01)
            assert figures[f"4 linear layers, {rule}, {way}", TIME].target == 1.05
    assert len(found) == 2 * (3 + 2 + 2)
    assert len(ticks) == 4
    assert notes == memory_steps.NOTES
    bars = bars_of(Result("memory", found, True, 1))["4 linear layers"]
    assert list(bars) == [(rule, way) for rule in ("sgd", "adamw") for way in ("deferred", "eager", "epilogue")]
    assert bars["adamw", "deferred"]["gradients"] == 4 * 64 * 64 * 4


def test_apollo_has_its_rank(small: None) -> None:
    (model,) = memory_steps.models(True)
    assert memory_steps.training(model, "apollo").hyper == {"rank": 16}
    assert memory_steps.training(model, "sgd").hyper == {}


def test_the_models_are_those_of_the_manual() -> None:
    names = [model.name for model in memory_steps.models(False)]
    assert names == ["24 linear layers of 1024", "a transformer with tied embeddings", "Llama of 7.5B"]
    linears, _, llama = memory_steps.models(False)
    assert (linears.dtype, llama.dtype, llama.rank) == ("float32", "bfloat16", 256)


def test_parts_are_those_that_are_counted(small: None) -> None:
    assert measurement("memory", True, ["lion"]).parts == memory_steps.parts(["lion"]) == 4
    assert measurement("memory", True, ["adamw"]).parts == 4 + 4


@pytest.mark.slow
def test_the_command_draws_what_it_measured(small: None, tmp_path: Path) -> None:
    picture = tmp_path / "below" / "memory.png"
    shown = run("bench", "memory", "--quick", "--rule", "sgd", "--chart", str(picture))
    assert "4 linear layers, sgd, epilogue" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 5000


def test_mistakes_of_the_chart(tmp_path: Path) -> None:
    assert "--chart is of one measurement, memory or states" in error("bench", "rules", "--chart", "x.png")
    with pytest.raises(RulecError, match="there is nothing to draw"):
        draw(Result("memory", [], True, 1), tmp_path / "x.png")


def test_rows_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_jax, "models", lambda quick: [partial(memory_jax._linears, 4, 64)])
    notes: list[str] = []
    deferred, eager = memory_jax.measure(True, ["sgd"], lambda: None, notes)
    assert (deferred.measure, len(notes)) == (memory_jax.PEAK, 1)
    assert eager.subject == "JAX: 4 linear layers of 64, sgd, eager"
    assert 1 < eager.value < deferred.value
    assert deferred.value == pytest.approx(deferred.detail["peak"] / (4 * 64 * 64 * 4))


@pytest.mark.slow
def test_every_model_of_jax_has_rows() -> None:
    found = memory_jax.measure(True, ["sgd"], lambda: None, [])
    assert len(found) == 2 * 4
    assert all(row.value > 1 for row in found)
