"""The manual's pages of figures: fresh, and made of results that count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.charts import CHARTS, bars_of
from benchmarks.page import figure, read, results_pages, target
from benchmarks.result import Result, Row
from rulec.errors import RulecError

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, result: Result) -> None:
    (folder / f"{result.name}.json").write_text(json.dumps(result.data()))


def test_the_pages_of_the_manual_are_made_of_the_recorded_results() -> None:
    docs = ROOT / "docs"
    for name, text in results_pages(docs / "benchmarks").items():
        page = docs / "benchmarks" / f"{name}.md" if name else docs / "benchmarks.md"
        assert page.read_text(encoding="utf-8") == text, "write it again with rulec bench --json --page"


def test_every_row_is_in_its_chapter_with_its_target_and_whether_it_is_met(tmp_path: Path) -> None:
    rows = [Row("fast", "speed", 1.2, 1.0), Row("slow", "speed; 3 ns", 0.5, 1.0), Row("told", "size", 3.0)]
    write(tmp_path, Result("many", rows, False, 2, ["a note"]))
    write(tmp_path, Result("race", rows[2:], False, 2))
    pages = results_pages(tmp_path)
    assert "| fast | 1.20 | at least 1 | yes |" in pages["many"]
    assert "| slow; 3 ns | 0.50 | at least 1 | **no** |" in pages["many"]
    assert "| told | 3.00 |" in pages["many"]
    assert "1 of 2 targets are met." in pages["many"]
    assert "targets are met" not in pages["race"]
    assert "- a note" in pages["many"]
    assert "2 threads" in pages["many"]
    assert "- **Many tensors, speed, at least 1**: slow; 3 ns: 0.50" in pages["missed"]
    assert "[Many tensors](benchmarks/many.md) | 3 | 1 of 2 |" in pages[""]


def test_a_long_chapter_says_what_lies_in_each_closed_table(tmp_path: Path) -> None:
    rows = [Row(f"rule {i}", "speed", 1 + i / 10, 1.5) for i in range(30)]
    write(tmp_path, Result("many", rows, False, 2, []))
    page = results_pages(tmp_path)["many"]
    assert "<summary>speed: 30 figures, 1.00 to 3.90, 25 of 30 targets met</summary>" in page
    assert page.count("| rule ") == 30


def test_every_chart_has_bars_of_recorded_results() -> None:
    """A bar is as long as its figure, and the longest is all of the width."""
    folder = ROOT / "docs" / "benchmarks"
    results = {path.stem: read(path) for path in folder.glob("*.json")}
    assert [len(bars_of(chart, results)) > 2 for chart in CHARTS] == [True] * 6
    page = results_pages(folder)[""]
    assert page.count('style="width: 100.0%"') == len(CHARTS)
    rows = [Row("sgd, torch.optim.SGD(fused=True)", "kernel, times as fast as torch's fused step", 2.0)]
    ((label, row),) = bars_of(CHARTS[0], {"rules": Result("rules", rows, False, 2)})
    assert (label, row.value) == ("sgd, beside torch's fused step", 2.0)


def test_what_was_not_run_for_want_of_time_is_one_note(tmp_path: Path) -> None:
    notes = ["a: not run: 3 s were left of its time, and it may take 5", "cupy: not run: no GPU", "b: failed: it hung"]
    notes.append("c: not run: 2 s were left of its time, and it may take 5")
    write(tmp_path, Result("many", [], False, 2, notes))
    page = results_pages(tmp_path)["many"]
    assert [line for line in page.splitlines() if line.startswith("- ")] == [
        "- cupy: not run: no GPU", "- b: failed: it hung", "- not run for want of time: a; c",
    ]  # fmt: skip


def test_without_results_the_page_says_how_to_get_them(tmp_path: Path) -> None:
    assert "No results are recorded" in results_pages(tmp_path)[""]


def test_quick_results_are_not_published(tmp_path: Path) -> None:
    write(tmp_path, Result("rules", [], True, 2))
    with pytest.raises(RulecError, match="--quick"):
        results_pages(tmp_path)


def test_figures_and_targets_are_short() -> None:
    shown = {123.4: "123", 12.34: "12.3", 1.234: "1.23", 0.01234: "0.0123", 0.0: "0.00"}
    assert {x: figure(Row("", "", x)) for x in shown} == shown
    assert figure(Row("", "", 0.5, unit="s")) == "0.50 s"
    assert target(Row("", "", 1, 0.5, "at most", "s")) == "at most 0.5 s"
    assert target(Row("", "", 1)) == ""
