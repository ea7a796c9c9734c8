"""The budget of the measurement on a GPU: what fails, hangs or dies costs itself, and what does not fit is listed."""

from __future__ import annotations

from benchmarks.gpu.part import Checked, Findings, Note, Part, Section
from benchmarks.gpu.run import START, Ended, Run, Started
from benchmarks.result import Row
from tests.benchmarks.gpu_fakes import Clock, Script, ScriptedCrew, nothing


def part(name: str, seconds: float = 60.0, least: float = 3.0) -> Part:
    return Part(name, nothing, (), seconds, least)


def run(
    sections: list[Section], scripts: dict[str, Script], seconds: float = 1000.0, size: int = 3
) -> tuple[ScriptedCrew, Findings, list[int]]:
    """The crew, what was found, and how many findings there were after each part."""
    clock = Clock()
    crew, findings, changes = ScriptedCrew(size, clock, scripts), Findings(), list[int]()
    running = Run(crew, seconds, clock, lambda: changes.append(len(findings.rows) + len(findings.notes)))
    for section in sections:
        running.section(section, findings)
    return crew, findings, changes


def test_parts_that_time_run_alone_and_others_together() -> None:
    timed, checked = [part("a"), part("b")], [part("c"), part("d"), part("e"), part("f")]
    crew, findings, _ = run([Section("alone", timed, 100.0), Section("all", checked, 100.0, together=True)], {})
    assert crew.given == [
        (0.0, 0, "a"), (1.0, 0, "b"), (2.0, 0, "c"), (2.0, 1, "d"), (2.0, 2, "e"), (3.0, 0, "f"),
    ]  # fmt: skip
    assert findings.notes == []


def test_what_is_found_is_told_after_every_part() -> None:
    rows = [Row("x", "speed", float(i)) for i in range(3)]
    scripts: dict[str, Script] = {
        "a": [(0.0, Started()), (1.0, rows[0]), (1.0, rows[1]), (1.0, Ended())],
        "b": [(0.0, Started()), (1.0, rows[2]), (1.0, Note("said")), (0.0, Note("said")), (0.0, Ended())],
    }
    _, findings, changes = run([Section("s", [part("a"), part("b")], 100.0)], scripts)
    assert findings.rows == rows
    assert findings.notes == ["said"]
    assert changes == [2, 4]


def test_every_finding_is_told_at_once() -> None:
    """So that the results are written after every row, whatever becomes of the rest of the part."""
    says: Script = [(0.0, Started()), (1.0, Row("x", "y", 1.0)), (1.0, Note("said")), (1e9, Ended())]
    clock, findings, told = Clock(), Findings(), list[tuple[float, int, int]]()
    crew = ScriptedCrew(1, clock, {"a": says})

    def keep() -> None:
        told.append((clock.now, len(findings.rows), len(findings.notes)))

    Run(crew, 50.0, clock, lambda: None, keep).section(Section("s", [part("a")], 50.0), findings)
    assert told == [(1.0, 1, 0), (2.0, 1, 1)]


def test_a_part_that_fails_is_a_sentence_and_the_rest_goes_on() -> None:
    scripts: dict[str, Script] = {"a": [(0.0, Started()), (1.0, Ended("ValueError: no"))]}
    crew, findings, changes = run([Section("s", [part("a"), part("b")], 100.0)], scripts)
    assert findings.notes == ["a: failed: ValueError: no"]
    assert [name for _, _, name in crew.given] == ["a", "b"]
    assert len(changes) == 2


def test_a_part_that_hangs_is_ended_at_its_limit_and_keeps_what_it_found() -> None:
    row = Row("x", "speed", 1.0)
    scripts: dict[str, Script] = {"a": [(5.0, Started()), (1.0, row), (1e9, Ended())]}
    crew, findings, _ = run([Section("s", [part("a", seconds=20.0), part("b")], 500.0)], scripts)
    assert crew.ended == [(25.0, 0)]  # counted from when it started, not from when its process did
    assert findings.rows == [row]
    assert findings.notes == ["a: failed: it was not done when its time was over, and was ended"]
    assert crew.given[-1] == (25.0, 0, "b")


def test_a_process_that_never_starts_is_ended_too() -> None:
    crew, findings, _ = run([Section("s", [part("a", seconds=20.0)], 500.0)], {"a": [(1e9, Started())]})
    assert crew.ended == [(20.0 + START, 0)]
    assert len(findings.notes) == 1


def test_several_hang_at_once_and_others_work_on() -> None:
    scripts: dict[str, Script] = {name: [(0.0, Started()), (1e9, Ended())] for name in ("a", "b")}
    parts = [part("a", seconds=10.0), part("b", seconds=10.0), part("c"), part("d")]
    crew, findings, _ = run([Section("s", parts, 500.0, together=True)], scripts)
    assert sorted(crew.ended) == [(10.0, 0), (10.0, 1)]
    assert [(at, name) for at, _, name in crew.given] == [(0.0, "a"), (0.0, "b"), (0.0, "c"), (1.0, "d")]
    assert len(findings.notes) == 2


def test_parts_without_time_are_listed_and_shorter_ones_still_run() -> None:
    scripts: dict[str, Script] = {"a": [(0.0, Started()), (90.0, Ended())]}
    parts = [part("a", seconds=200.0), part("b", least=30.0), part("c", least=5.0)]
    crew, findings, changes = run([Section("s", parts, 100.0)], scripts)
    assert [name for _, _, name in crew.given] == ["a", "c"]
    assert findings.notes == ["b: not run: 10 s were left of its time, and it may take 30"]
    assert len(changes) == 3


def test_what_was_begun_is_counted() -> None:
    """A section of which nothing was begun did not run: its part keeps what it had."""
    clock = Clock()
    running = Run(ScriptedCrew(1, clock, {"a": [(0.0, Started()), (90.0, Ended())]}), 100.0, clock, lambda: None)
    first, second = (
        Section("s", [part("a"), part("b", least=50.0)], 100.0),
        Section("t", [part("c", least=50.0)], 100.0),
    )
    assert [running.section(section, Findings()) for section in (first, second)] == [1, 0]


def test_a_section_ends_in_time_for_the_next() -> None:
    hangs: Script = [(0.0, Started()), (1e9, Ended())]
    sections = [Section("first", [part("a", seconds=500.0)], 50.0), Section("second", [part("b")], 50.0)]
    crew, _, _ = run(sections, {"a": hangs})
    assert crew.ended == [(50.0, 0)]
    assert crew.given[-1] == (50.0, 0, "b")


def test_nothing_runs_past_the_budget() -> None:
    hangs: Script = [(0.0, Started()), (1e9, Ended())]
    parts = [part(name, seconds=400.0) for name in "abcd"]
    crew, findings, _ = run([Section("s", parts, 1e6)], dict.fromkeys("abcd", hangs), seconds=500.0)
    assert crew.clock.now == 500.0
    assert crew.ended == [(400.0, 0), (500.0, 0)]
    assert [note.split(":")[1].strip() for note in findings.notes] == ["failed", "failed", "not run", "not run"]


def test_rules_are_counted_by_backend_dtype_and_kind() -> None:
    findings = Findings()
    for one in (
        Checked("triton", "adam", "float32", 1e-7), Checked("triton", "sgd", "float32", fault="wrong by 1"),
        Checked("triton", "muon", "float32", refused="no products"), Checked("triton", "adam", "float16", 1e-3),
        Checked("triton", "exp(g)", "float32", 1e-8, kind="operations"),
    ):  # fmt: skip
        findings.add(one)
    rows = {row.what: row for row in findings.correctness()}
    assert list(rows) == [
        "triton, float32: operations that agree with the float64 reference",
        "triton, float16: rules that agree with the float64 reference",
        "triton, float32: rules that agree with the float64 reference",
    ]
    findings.add(Checked("steps", "test_a", "", kind="tests"))
    findings.add(Checked("steps", "test_a", "", fault="its end", kind="tests"))
    findings.add(Checked("steps", "test_b", "", refused="no device", kind="tests"))
    tests = next(row for row in findings.correctness() if row.what == "steps: tests that pass")
    assert (tests.value, tests.target) == (0, 1)
    assert tests.detail == {"failed": {"test_a": "its end"}, "refused": {"test_b": "no device"}}
    row = rows["triton, float32: rules that agree with the float64 reference"]
    assert (row.value, row.target, row.met) == (1, 2, False)
    assert row.detail == {
        "largest difference": {"adam": 1e-7}, "failed": {"sgd": "wrong by 1"}, "refused": {"muon": "no products"},
    }  # fmt: skip
