"""The measurement of steps in JAX: what it compares takes the same steps, and its rows have their targets."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import page, suite
from benchmarks.gpu import jax as gpu_jax
from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Note
from benchmarks.jax import first as jax_first
from benchmarks.jax import measure as bench_jax
from benchmarks.jax import steps as jax_steps
from benchmarks.result import Row
from rulec import extras
from rulec.errors import RulecError
from rulec.tools.compare.measure import Times
from tests.benchmarks.gpu_fakes import HostDevice


def held(step: Callable[[], object]) -> list[Any]:
    """What a contender holds after three steps: parameters and state."""
    for _ in range(3):
        step()
    cells = dict(zip(step.__code__.co_freevars, step.__closure__ or (), strict=True))  # type: ignore[attr-defined]
    found: list[Any] = cells["held"].cell_contents
    return found


@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_contenders_take_the_same_steps(rule: str) -> None:
    grads = jax_steps.tree(2, 50, "gradient")
    ours = held(jax_steps.ours(rule, grads, jax_steps.tree(2, 50, "parameter"), packed=rule == "adamw"))
    theirs = held(jax_steps.theirs(rule, grads, jax_steps.tree(2, 50, "parameter")))
    moved = np.abs(np.asarray(theirs[0]["layer1"] - jax_steps.tree(2, 50, "parameter")["layer1"]))
    assert moved.min() > 1e-4
    for a, b in zip(jax.tree.leaves(ours[0]), jax.tree.leaves(theirs[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_every_rule_that_optax_has_is_measured() -> None:
    names = bench_jax.plan(())
    assert {"adamw", "lion", "sgd", "adagrad", "yogi", "lamb", "prodigy"} <= {*names}
    assert "apollo" not in names
    assert bench_jax.plan(("lion",)) == ["lion"]
    assert bench_jax.parts(("lion",)) == 1
    assert bench_jax.parts(("adamw",)) == 1 + len(bench_jax.MANY) + 1


def test_the_targets_are_those_that_were_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_jax, "MANY", bench_jax.MANY[:1])
    monkeypatch.setattr(jax_first, "rows", lambda quick, rounds: [])
    done: list[int] = []
    result = bench_jax.measure(True, ("adamw", "lion"), lambda: done.append(1))
    assert {row.what: row.target for row in result.rows} == {
        "adamw, optax.adamw: step, times as fast as optax": 1.2,
        "adamw, optax.adamw: step by XLA alone, times as fast as optax": None,
        "lion, optax.lion: step, times as fast as optax": 1.0,
        "adamw, 10 leaves of 1,000: step with packed states, times as fast as optax": 2.0,
        "adamw, 10 leaves of 1,000: step, times as fast as optax": 2.0,
    }
    row = result.rows[0]
    assert row.detail["scatter"][0] <= row.value <= row.detail["scatter"][1]
    assert "| lion, optax.lion |" in page._chapter(result)


def test_a_step_that_takes_half_as_long_is_twice_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Times({"optax": [0.02, 0.04, 0.02], "step": [0.01, 0.02, 0.01]})
    monkeypatch.setattr(bench_jax, "interleaved", lambda *_, **__: found)
    contenders = {"optax": lambda: None, "step": lambda: None}
    (row,) = bench_jax._rows("", contenders, 3, {"step": ("", 1.0), "alone": ("", None)})
    assert row.value == 2.0


@pytest.mark.slow
def test_first_calls_are_those_of_new_processes() -> None:
    found = jax_first.rows(True, 1)
    assert [row.target for row in found] == [1.0, 1.0]
    for row in found:
        assert row.value == pytest.approx(row.detail["optax"] / row.detail["seconds"])
        assert 0.01 < row.detail["seconds"] < 60


def test_a_process_that_fails_is_said() -> None:
    with pytest.raises(RulecError, match="a process that measures a first call in JAX failed: ZeroDivisionError"):
        jax_first._seconds("1 / 0")


def test_what_optax_refuses_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> Any:
        raise ValueError("not today\nand more")

    notes: list[str] = []
    monkeypatch.setattr(bench_jax, "theirs", refuses)
    assert list(bench_jax._rule("lion", 10, 1, notes)) == []
    assert notes == ["lion: optax.lion does not run here: not today"]


def test_without_jax_it_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.device.missing", lambda: "no GPU")
    assert "jax" in suite.usual()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "optax" else find(name))
    assert "jax" not in suite.usual()
    assert bench_jax.missing() == f"rulec bench jax needs optax, which is not installed: {extras.command('jax')}"
    assert gpu_jax.parts(()) == []
    assert gpu_jax.missing(()) == ["jax and optax, to step in, are not installed"]
    assert gpu_jax.missing(("muon",)) == []


# The part of the measurement on a GPU, at a size that takes no time


@pytest.mark.parametrize(
    ("rule", "target", "moved"), [("lion", 0.95, 5), pytest.param("lamb", None, 10, marks=pytest.mark.slow)]
)
def test_a_step_on_a_gpu_is_held_against_a_copy_and_optax(
    rule: str, target: float | None, moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_jax, "TOGETHER", 2)
    share, faster = gpu_jax.rule(Bench(True, HostDevice()), rule)
    assert isinstance(share, Row)
    assert isinstance(faster, Row)
    assert (share.target, faster.target) == (target, 1.0)
    assert share.detail["bytes"] == moved * 4 * gpu_jax.QUICK
    least, most = share.detail["scatter"]
    assert least * moved / 2 <= share.value * (1 + 1e-9)
    assert share.value <= most * moved / 2 * (1 + 1e-9)
    assert faster.measure == f"step in JAX, times as fast as optax.{rule}"


@pytest.mark.parametrize("rule", gpu_jax.OF_LEAVES)
def test_many_leaves_on_a_gpu_are_to_be_twice_as_fast(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_jax, "TOGETHER", 1)
    seconds = {"step": 1.0, "packed": 4.0, "optax": 6.0}

    def interleaved(contenders: dict[str, Any], rounds: int) -> Times:
        for step in contenders.values():
            step()
        return Times({name: [seconds[name]] for name in contenders})

    monkeypatch.setattr(gpu_jax, "interleaved", interleaved)
    found = {row.what: row for row in gpu_jax.leaves(Bench(True, HostDevice()), rule) if isinstance(row, Row)}
    subject = f"{rule}, 5 leaves of 1,000 in JAX"
    assert {what: (row.value, row.target, row.met) for what, row in found.items()} == {
        f"{subject}: step in JAX, times as fast as optax.{rule}": (6.0, 2.0, True),
        f"{subject}: step in JAX with packed states, times as fast as optax.{rule}": (1.5, 2.0, False),
    }


def test_without_a_gpu_of_jax_there_is_a_note() -> None:
    (note,) = gpu_jax.rule(Bench(False, HostDevice()), "lion")
    assert note == Note("lion in JAX: not run: jax sees no GPU; pip install 'jax[cuda12]'")
    assert [*gpu_jax.leaves(Bench(False, HostDevice()), "lion")] == [note]
    assert [part.name for part in gpu_jax.parts(("lamb",))] == ["lamb in JAX at 100 Mi"]
    assert [part.name for part in gpu_jax.parts(("lion",))] == ["lion in JAX at 100 Mi", "lion in JAX of 1000 leaves"]
