"""The manual's page: fresh, and made of results that count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.page import figure, results_page, target
from benchmarks.result import Result, Row
from rulec.errors import RulecError

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, result: Result) -> None:
    (folder / f"{result.name}.json").write_text(json.dumps(result.data()))


def test_the_page_of_the_manual_is_made_of_the_recorded_results() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert page == results_page(ROOT / "docs" / "benchmarks"), "write it again with rulec bench --json --page"


def test_every_row_is_on_the_page_with_its_target_and_whether_it_is_met(tmp_path: Path) -> None:
    rows = [Row("fast", "speed", 1.2, 1.0), Row("slow", "speed", 0.5, 1.0), Row("told", "size", 3.0)]
    write(tmp_path, Result("many", rows, False, 2, ["a note"]))
    page = results_page(tmp_path)
    assert "| fast | speed | 1.20 | at least 1 | yes |" in page
    assert "| slow | speed | 0.50 | at least 1 | **no** |" in page
    assert "| told | size | 3.00 |  |  |" in page
    assert "1 of 2 targets are met." in page
    assert "- a note" in page
    assert "2 threads" in page


def test_what_was_not_run_for_want_of_time_is_one_note(tmp_path: Path) -> None:
    notes = ["a: not run: 3 s were left of its time, and it may take 5", "cupy: not run: no GPU", "b: failed: it hung"]
    notes.append("c: not run: 2 s were left of its time, and it may take 5")
    write(tmp_path, Result("many", [], False, 2, notes))
    page = results_page(tmp_path)
    assert [line for line in page.splitlines() if line.startswith("- ")] == [
        "- cupy: not run: no GPU", "- b: failed: it hung", "- not run for want of time: a; c",
    ]  # fmt: skip


def test_without_results_the_page_says_how_to_get_them(tmp_path: Path) -> None:
    assert "No results are recorded" in results_page(tmp_path)


def test_quick_results_are_not_published(tmp_path: Path) -> None:
    write(tmp_path, Result("rules", [], True, 2))
    with pytest.raises(RulecError, match="--quick"):
        results_page(tmp_path)


def test_figures_and_targets_are_short() -> None:
    shown = {123.4: "123", 12.34: "12.3", 1.234: "1.23", 0.01234: "0.0123", 0.0: "0.00"}
    assert {x: figure(Row("", "", x)) for x in shown} == shown
    assert figure(Row("", "", 0.5, unit="s")) == "0.50 s"
    assert target(Row("", "", 1, 0.5, "at most", "s")) == "at most 0.5 s"
    assert target(Row("", "", 1)) == ""
