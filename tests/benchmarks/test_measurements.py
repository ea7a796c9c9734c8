"""Every measurement runs, at sizes that take no time, and its rows say what they should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rulec
from benchmarks import many, mesh, race, rules, start
from benchmarks.kernels import Pool, as_storage, bound, pair, threads
from benchmarks.memory import measure as memory
from benchmarks.memory import steps as memory_steps
from benchmarks.resident import peak_growth
from benchmarks.result import read_result
from benchmarks.suite import MEASUREMENTS, measurement
from rulec.compiler.layout import layout_for
from rulec.errors import RulecError
from rulec.tools.race.tasks import TASKS
from tests.cli.running import error, run


def test_the_limit_leaves_every_array_as_it_is() -> None:
    """So that it can run by turns with the kernel over the same memory."""
    program = rulec.compile(rulec.load("adamw"))
    kernels = pair(program, layout_for(program, "float32"))
    pool = Pool(1000)
    params, grads, states = pool.tensors(kernels)
    before = {"p": params[0].copy(), "g": grads[0].copy(), **{k: v.copy() for k, v in states[0].items()}}
    bound(kernels.limit, params, grads, states, kernels.rows(1, (1000,)))()
    after = {"p": params[0], "g": grads[0], **states[0]}
    for name, value in after.items():
        np.testing.assert_array_equal(value.view(np.uint32), before[name].view(np.uint32), name)


def test_the_kernel_timed_is_the_one_a_step_runs() -> None:
    """Ten steps of an optimizer, the last by the kernel alone with the table of step ten."""
    program = rulec.compile(rulec.load("adam"))
    kernels = pair(program, layout_for(program, "float32"))
    stepped, gradient = np.ones(100, np.float32), np.linspace(-1, 1, 100, dtype=np.float32)
    optimizer = rulec.array.Optimizer("adam", [stepped])
    for _ in range(9):
        optimizer.step([gradient])
    alone = stepped.copy()
    states = {k: optimizer.state("0")[k].copy() for k in ("m", "v")}
    optimizer.step([gradient])
    bound(kernels.kernel, [alone], [gradient], [states], kernels.rows(1, (100,)))()
    np.testing.assert_array_equal(alone, stepped)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_storage(dtype: str) -> None:
    stored = as_storage(np.array([1.0, -2.0, 0.5], np.float32), dtype)
    assert stored.itemsize == (4 if dtype == "float32" else 2)
    wide = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32) if dtype == "bfloat16" else stored
    assert wide.tolist() == [1.0, -2.0, 0.5]


def test_a_pool_gives_one_memory_to_one_name() -> None:
    pool = Pool(70_000)
    first, second = pool.array("a", "float32", positive=False), pool.array("a", "bfloat16", positive=True)
    assert np.shares_memory(first, second)
    assert not np.shares_memory(first, pool.array("b", "float32", positive=False))
    assert (pool.array("c", "float32", positive=True) > 0).all()


def test_every_elementwise_rule_is_planned_and_no_transform() -> None:
    planned = rules.plan(())
    assert {"adamw", "nadam", "madgrad", "sgd"} <= set(planned)
    assert not any(name.startswith("transforms/") for name in planned)
    assert rules.plan(("lion",)) == ["lion"]


def test_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "QUICK", 10_000)
    monkeypatch.setattr(rules, "QUICK_ROUNDS", 1)
    ticks: list[None] = []
    monkeypatch.setattr(rules, "HALF_WIDTH", (("adamw", "bfloat16", "float32"),))
    result = rules.measure(True, ["adamw", "rprop", "sophia"], lambda: ticks.append(None))
    figures = {row.what: row for row in result.rows}
    assert {what: row.target for what, row in figures.items()} == {
        f"adamw, float32: {rules.LIMIT}": 0.95,
        f"adamw, torch.optim.AdamW(fused=True): {rules.FUSED}": 1.0,
        f"rprop, float32: {rules.LIMIT}": 0.95,
        f"rprop, torch.optim.Rprop(foreach=True): {rules.FOREACH}": 4.0,
        f"sophia, float32: {rules.LIMIT}": 0.95,
        f"adamw, bfloat16 with float32 states: {rules.LIMIT_HALF}": 0.9,
    }
    limited = figures[f"adamw, bfloat16 with float32 states: {rules.LIMIT_HALF}"]
    assert limited.detail["bytes"] == (3 * 2 + 4 * 4) * 10_000
    assert limited.value == pytest.approx(limited.detail["limit"] / limited.detail["kernel"])
    assert len(ticks) == measurement("rules", True, ["adamw", "rprop", "sophia"]).parts


def test_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "SIZES", ((3, 100, 7.0, 31.0),))
    monkeypatch.setattr(many, "QUICK_ROUNDS", 1)
    monkeypatch.setattr(many, "GROUPS", 4)
    result = many.measure(True)
    assert [(row.target, row.sense) for row in result.rows] == [
        (0.9, "at least"), (7.0, "at least"), (None, "at least"), (31.0, "at most"), (1.2, "at most"),
    ]  # fmt: skip
    kernel, step, scheduled, added, groups = result.rows
    assert kernel.value == pytest.approx(kernel.detail["limit"] / kernel.detail["kernel"])
    assert step.value == pytest.approx(step.detail["torch"] / step.detail["step"])
    assert scheduled.value == pytest.approx(scheduled.detail["torch scheduled"] / scheduled.detail["scheduled"])
    assert added.unit == "us"
    assert groups.value == pytest.approx(groups.detail["groups"] / groups.detail["one"])


def test_memory() -> None:
    notes: list[str] = []
    rows = memory._alone(memory.LARGE // 10, lambda: None, notes)
    assert notes == []
    values = {row.what: row for row in rows}
    assert values["arrays: bytes of state kept for each parameter"].value == pytest.approx(8, abs=0.01)
    judged = [row for row in rows if row.target is not None]
    assert len(judged) == 4
    assert [row.what for row in judged if not row.met] == []
    # What is measured would show: torch's foreach needs memory that grows with the parameters.
    assert values["torch.optim.AdamW(foreach=True): bytes a step allocates for each parameter"].value > 1


def test_peak_growth_sees_memory_that_is_freed_again() -> None:
    size = 64 * 2**20

    def work() -> None:
        np.ones(size // 8).sum()

    assert 0.9 * size < peak_growth(work) < 2 * size
    assert peak_growth(lambda: None) < size / 8


@pytest.mark.slow
def test_start() -> None:
    parts: list[None] = []
    result = start.measure(True, lambda: parts.append(None))
    assert len(parts) == start.parts()
    assert len(result.rows) == start.parts()  # without the kernels of the library; imports are two rows
    for row in result.rows:
        assert row.value > 0
        numba = row.subject == "import numba"
        assert {"sympy", "mpmath", "numba"} & set(row.detail.get("heavy", ())) == ({"numba"} if numba else set())


def test_races_on_all_tasks_in_one_batch_are_measured_against_their_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: dict[str, list[int]] = {}
    advance = race.Contender.advance

    def counted(contender: Any, steps: int) -> None:
        runs.setdefault(contender.task.name, []).append(len(contender.grid.rates) * len(contender.grid.seeds))
        advance(contender, steps)

    monkeypatch.setattr(race.Contender, "advance", counted)
    rows = race.measure(True, ["adamw"]).rows
    assert [row.subject for row in rows] == [f"adamw on {task}" for task in TASKS]
    assert {row.measure for row in rows} == {"24 runs one by one, times as long as one batch"}
    for counts in map(runs.__getitem__, TASKS):
        assert {*counts} == {1, 24}
        assert counts.count(1) % 24 == 0


def test_a_process_that_fails_is_said() -> None:
    with pytest.raises(RulecError, match="ZeroDivisionError"):
        start._run("1/0", None)


def test_a_row_of_the_import_says_what_was_loaded() -> None:
    report = start._run(start._IMPORT.format(package="rulec"), None)
    assert report["heavy"] == []
    assert 0 < report["modules"] < 200


def test_names_of_measurements() -> None:
    assert list(MEASUREMENTS) == [
        "rules",
        "reductions",
        "matrices",
        "orthogonal",
        "many",
        "watch",
        "offload",
        "start",
        "memory",
        "mesh",
        "states",
        "es",
        "race",
        "jax",
        "gpu",
    ]
    for name in MEASUREMENTS:
        assert measurement(name, True).parts > 0
    with pytest.raises(RulecError, match="there is no measurement 'rule'; did you mean 'rules'"):
        measurement("rule", True)


def test_threads_are_at_least_one() -> None:
    assert threads() >= 1


def test_the_command_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "QUICK", 10_000)
    monkeypatch.setattr(rules, "QUICK_ROUNDS", 1)
    monkeypatch.setattr(rules, "HALF_WIDTH", ())
    shown = run("bench", "rules", "--quick", "--rule", "sgd", "--json", str(tmp_path))
    assert "quick: these figures do not count" in shown
    assert "nothing here is about" not in shown
    result = read_result(tmp_path / "rules.json")
    assert result.quick
    assert result.rows[0].subject == "sgd, float32"
    run("bench", "rules", "--quick", "--rule", "sgd", "--json", str(tmp_path / "one.json"))
    assert read_result(tmp_path / "one.json").rows[0].subject == "sgd, float32"


def test_a_measurement_that_fails_loses_none_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RulecError("no more memory")

    monkeypatch.setattr(memory, "SMALL", 1000)
    monkeypatch.setattr(memory_steps, "RULES", {})
    monkeypatch.setattr(race, "measure", fails)
    run("bench", "memory", "race", "--quick", "--rule", "adamw", "--json", str(tmp_path), code=2)
    assert read_result(tmp_path / "memory.json").rows


def test_a_rule_that_a_measurement_does_not_have_is_said() -> None:
    assert "nothing here is about lamb" in run("bench", "rules", "matrices", "--quick", "--rule", "lamb")


def test_the_command_prints_json_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SMALL", 1000)
    monkeypatch.setattr(memory_steps, "RULES", {})
    (result,) = json.loads(run("bench", "memory", "--quick", "--rule", "adamw", "--json", "-"))
    assert result["name"] == "memory"
    assert len(result["rows"]) == 5
    assert all(row["met"] in (True, False, None) for row in result["rows"])


def test_mistakes_of_the_command(tmp_path: Path) -> None:
    assert "there is no measurement 'speed'" in error("bench", "speed")
    assert "there is no library rule 'adamm'; did you mean 'adam'" in error("bench", "rules", "--rule", "adamm")
    for given in ((), ("--json", "-"), ("--json", str(tmp_path / "one.json"))):
        assert "--page needs the folder" in error("bench", "rules", "--page", str(tmp_path / "page.md"), *given)


@pytest.mark.slow
def test_the_work_of_meshes_is_that_of_one_device_in_parts() -> None:
    """Five iterations of three products for each matrix of two layers, of 64 by 64, 32 or 160."""
    rows = {(row.subject, row.measure): row.value for row in mesh.measure(True, lambda: None).rows}
    product = {(64, 64): 2 * 64**3 + 64**3, (32, 64): 2 * 32**2 * 64 + 32**3, (64, 160): 2 * 64**2 * 160 + 64**3}
    layer = 2 * product[64, 64] + 2 * product[32, 64] + 3 * product[64, 160]
    assert rows["1 GPU", mesh.TIME] == pytest.approx(2 * 5 * 2 * layer / mesh.RATE * 1000)
    shared = rows["8 GPUs, 2 x 4", mesh.TIME] / rows["8 GPUs, 2 x 4", mesh.WORK]
    assert shared == pytest.approx(rows["1 GPU", mesh.TIME] / 8)
    assert rows["1 GPU", mesh.MATRICES] == 0 < rows["8 GPUs, 2 x 4", mesh.MATRICES]
