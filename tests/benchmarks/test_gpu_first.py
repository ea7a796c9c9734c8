"""First looks: what they hold and in what order, their time, and the file that they fill; the parts are scripted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import asked as gpu_asked
from benchmarks.gpu import first as gpu_first
from benchmarks.gpu import measure as gpu
from benchmarks.gpu import tests as gpu_tests
from benchmarks.gpu.asked import ENDING, FIRST, FIRST_BUDGET, Asked
from benchmarks.gpu.names import PARTS
from benchmarks.gpu.part import Checked, Section
from benchmarks.gpu.run import Ended, Started
from benchmarks.result import Row, read_result
from rulec.compiler.layout import FLOATS
from tests.benchmarks.test_gpu_command import Crew, crew
from tests.cli.running import error, run

__all__ = ["crew"]  # the fixture

MISSING = "pytest, to run tests on the GPU with, is not installed"


def sections(first: str, budget: float = FIRST_BUDGET) -> list[Section]:
    return gpu_first.sections(first, ("triton", "cupy"), ("why not",), budget)


def names(planned: list[Section]) -> list[str]:
    return [part.name for section in planned for part in section.parts]


@pytest.mark.parametrize("first", FIRST)
def test_a_first_look_is_of_named_parts_and_fits_its_time(first: str) -> None:
    planned = sections(first)
    assert {section.name for section in planned} <= {*PARTS}
    assert len({*names(planned)}) == len(names(planned))
    assert max(section.seconds for section in planned) < 0.6 * FIRST_BUDGET
    assert [one.seconds for one in sections(first, 140.0)] == [one.seconds / 2 for one in planned]


def test_correctness_is_looked_at_by_risk() -> None:
    *first, checks, fourth, fifth = sections("correctness")
    assert names([*first, fourth, fifth]) == [
        "tests of products of Muon, captured steps and steps", "tests of codes and 16-bit weights",
        "tests of steps on the host and statistics", "tests of eager updates and launches",
        "tests of random numbers, noise and arrays",
    ]  # fmt: skip
    assert (checks.together, checks.notes) == (True, ["why not"])
    looked = names([checks])
    slow = [f"correctness of ranger21 in {dtype}, {backend}" for backend in ("triton", "cupy") for dtype in FLOATS]
    assert looked[:8] == slow
    assert looked[8:10] == ["correctness of muon, triton", "correctness of adafactor, triton"]
    kinds = [name.partition(" ")[0] for name in looked]
    assert list(dict.fromkeys(kinds)) == ["correctness", "statistics", "operations", "stages"]
    assert [name for name in looked if name.startswith("operations")] == [
        f"operations in {dtype}, {backend}" for backend in ("triton", "cupy") for dtype in ("float32", "float64")
    ]


def test_every_file_of_tests_is_there() -> None:
    for files in gpu_tests.FILES.values():
        for file in files:
            text = (gpu_tests.ROOT / file).read_text()
            assert "pytest.mark.gpu" in text, file


def test_without_pytest_rules_are_looked_at_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests, "missing", lambda: MISSING)
    *first, checks, fourth, fifth = sections("correctness")
    assert [section.parts for section in (*first, fourth, fifth)] == [[]] * 5
    assert checks.notes == ["why not", MISSING]
    assert checks.parts


def test_speed_is_looked_at_in_the_order_of_importance() -> None:
    planned = sections("speed")
    assert [section.name for section in planned] == [
        "rules", "host", "reductions", "muon", "states", "fused", "watch", "jax", "reductions", "offload",
    ]  # fmt: skip
    looked = names(planned)
    assert looked[:5] == [
        "copy bandwidth", "host time of adamw", "host time of adamw, 1 tensor", "host time of adamw, 300 tensors",
        "adafactor on the tensors of Llama 3.2 1B",
    ]  # fmt: skip
    assert "muon on GPT-2 XL against its products" in looked
    states = planned[4]
    assert [part.name for part in states.parts][:3] == [
        f"adamw in {name} at 100 Mi" for name in ("dynamic8", "int8", "float8_e4m3")
    ]
    assert "adamw with unaligned gradients in bfloat16" in looked
    assert [part.arguments for part in planned[5].parts] == [
        (size, "adamw", "torch's fused step") for size in ("100 Mi", "1000 tensors", "GPT-2 XL")
    ]
    assert names(planned[6:7])[0] == "adamw with statistics at 100 Mi"
    assert names(planned[8:9])[0] == "adafactor at 100 Mi"
    assert names(planned[9:]) == ["a Llama by adamw, on the host"]


def test_first_looks_fill_a_file_of_their_own(crew: type[Crew], tmp_path: Path) -> None:
    row = Row("1000 tensors", "host time of a step", 150.0, 200.0, "at most", "us")
    crew.scripts_of_all["host time of adamw"] = [(0.0, Started()), (1.0, row), (0.0, Ended())]
    tested = Checked("steps", "test_x", "", fault="wrong", kind="tests")
    crew.scripts_of_all["tests of codes and 16-bit weights"] = [(0.0, Started()), (1.0, tested), (0.0, Ended())]
    run("bench", "gpu", "--first", "correctness", "--json", str(tmp_path))
    run("bench", "gpu", "--first", "speed", "--json", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["gpu_first.json"]
    result = read_result(tmp_path / "gpu_first.json")
    assert result.name == "gpu_first"
    assert [(one.part, one.what, one.value, one.target) for one in result.rows] == [
        ("correctness", "steps: tests that pass", 0, 1), ("host", row.what, 150.0, 200.0),
    ]  # fmt: skip
    assert result.rows[0].detail == {"failed": {"test_x": "wrong"}, "refused": {}}
    assert {name for name, one in result.parts.items() if one.ran} == {
        "correctness", "fused", "host", "rules", "reductions", "states", "muon", "watch", "jax", "offload",
    }  # fmt: skip
    (tmp_path / "gpu_first.json").rename(tmp_path / "gpu.json")
    said = error("bench", "gpu", "--json", str(tmp_path))
    assert "has results of gpu_first: give rulec bench gpu another --json" in said
    assert len(crew.made) == 2


def test_a_first_look_is_of_the_gpu_and_of_itself_alone(crew: type[Crew]) -> None:
    assert "--first is of the measurement on a GPU alone: rulec bench gpu --first LOOK" in error(
        "bench", "rules", "--first", "speed"
    )
    assert "--seconds is of the measurement on a GPU alone: rulec bench gpu --seconds N" in error(
        "bench", "rules", "--seconds", "9"
    )
    assert "there is no first look 'sped'; did you mean 'speed'?: there are correctness, speed" in error(
        "bench", "gpu", "--first", "sped"
    )
    for other in (["--part", "muon"], ["--rule", "lion"], ["--tune"]):
        said = error("bench", "gpu", "--first", "speed", *other)
        assert "--first has rules and parts of its own: leave out --part, --rule and --tune" in said
    assert crew.made == []


@pytest.mark.parametrize(
    ("words", "budget"),
    [([], gpu.BUDGET), (["--first", "speed"], FIRST_BUDGET), (["--first", "speed", "--seconds", "40"], 40.0),
     (["--seconds", "90"], 90.0), (["--part", "host", "--seconds", "20"], 20.0)],
)  # fmt: skip
def test_a_run_ends_within_its_seconds(
    words: list[str], budget: float, crew: type[Crew], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where every part hangs. What is left for parts is counted from when the command began, with room for its end."""
    monkeypatch.setattr(gpu_asked.time, "monotonic", lambda: 1000.0)
    plain = gpu.Run

    def run_by(crew: Any, seconds: float, clock: Any, *rest: Any) -> Any:
        return plain(crew, seconds, crew.clock, *rest)

    class Hangs(dict[str, Any]):
        """What every part does."""

        def get(self, name: str, default: Any = None) -> Any:
            return [(0.0, Started()), (1e9, Ended())]

    monkeypatch.setattr(gpu, "Run", run_by)
    crew.scripts_of_all = Hangs(all=[])
    run("bench", "gpu", *words, "--json", str(tmp_path))
    (made,) = crew.made
    assert 0.9 * (budget - ENDING) <= made.clock.now <= budget - ENDING
    (file,) = tmp_path.iterdir()
    remarks = read_result(file).remarks
    assert any(": not run: " in remark for remark in remarks) or words[:2] == ["--part", "host"]


def test_the_seconds_that_passed_before_the_parts_are_not_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(gpu_asked.time, "monotonic", lambda: now)
    asked = Asked(seconds=100.0)
    now += 25.0
    assert asked.left() == 100.0 - 25.0 - ENDING
