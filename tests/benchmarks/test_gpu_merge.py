"""One file of several runs on GPUs: a run replaces rows of its own parts, leaves other rows, and the page shows all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import merge
from benchmarks.page import results_pages
from benchmarks.result import Record, Result, Row, read_result
from rulec.errors import RulecError

RECORDED = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "gpu.json"


def machine(name: str) -> dict[str, Any]:
    gpu = {"name": name, "memory_bytes": 2**36, "last_level_cache_bytes": None, "platform": "CUDA 13.0"}
    return {
        "cpu": "a processor", "cores": 8, "last_level_cache_bytes": None, "memory_bytes": 1, "system": "Linux",
        "versions": {"python": "3.12", "torch": "2.13"}, "gpu": gpu,
    }  # fmt: skip


def record(gpu: str, *notes: str, ran: bool = True, rules: tuple[str, ...] = ()) -> Record:
    return Record(ran, 60.0, list(notes), list(rules), machine(gpu), "2026-12-01")


def result(gpu: str, rows: list[Row], **parts: Record) -> Result:
    return Result("gpu", rows, False, 8, [], machine(gpu), "2026-12-01", parts)


FIRST = result(
    "H100", [Row("a", "speed", 1.0, part="muon"), Row("b", "speed", 2.0, part="host")],
    muon=record("H100", "muon: slow"), host=record("H100"),
)  # fmt: skip


def test_a_part_replaces_its_own_rows_and_notes_alone() -> None:
    new = result("H200", [Row("c", "speed", 3.0, part="muon")], muon=record("H200", "muon: fast"))
    both = merge.merged(FIRST, new)
    assert [(row.subject, row.part) for row in both.rows] == [("b", "host"), ("c", "muon")]
    assert both.remarks == ["muon: fast"]
    assert {name: one.machine["gpu"]["name"] for name, one in both.parts.items()} == {"host": "H100", "muon": "H200"}


def test_a_part_that_did_not_run_keeps_what_it_had() -> None:
    new = result("H200", [], muon=record("H200", "muon: not run", ran=False), large=record("H200", "no", ran=False))
    both = merge.merged(FIRST, new)
    assert both.rows == sorted(FIRST.rows, key=lambda row: row.part != "host")
    assert both.parts == {**FIRST.parts, "large": new.parts["large"]}
    again = merge.merged(both, result("H200", [], large=record("H200", "no memory", ran=False)))
    assert again.remarks == ["no memory", "muon: slow"]


def test_merging_twice_is_merging_once() -> None:
    """The file is written after every piece of work: the same results come again, and more."""
    new = result("H200", [Row("c", "speed", 3.0, part="muon")], muon=record("H200"))
    once = merge.merged(FIRST, new)
    assert merge.merged(once, new) == once


def test_rows_from_before_there_were_parts_stay_until_they_are_measured() -> None:
    old = replace(result("H200", [Row("a", "speed", 1.0), Row("b", "speed", 2.0)]), notes=["a: odd"])
    new = result("H100", [Row("b", "speed", 4.0, part="host")], host=record("H100"))
    both = merge.merged(old, new)
    assert [(row.subject, row.value, row.part) for row in both.rows] == [("a", 1.0, ""), ("b", 4.0, "host")]
    assert (both.machine["gpu"]["name"], both.notes) == ("H200", ["a: odd"])
    all_new = result("H100", [Row("a", "speed", 5.0, part="muon")], muon=record("H100"))
    done = merge.merged(both, all_new)
    assert [row.part for row in done.rows] == ["host", "muon"]
    assert done.notes == []


def test_the_recorded_results_load_and_merge() -> None:
    old = read_result(RECORDED)
    merge.check(old, "gpu.json", False, [])
    first = next(one for one in old.rows if not one.part)
    row = replace(first, value=1.25, part="large")
    both = merge.merged(old, result("H100", [row], large=record("H100")))
    assert [one for one in both.rows if one is not row] == [one for one in old.rows if one is not first]
    assert row in both.rows
    assert json.loads(json.dumps(both.data()))["parts"]["large"]["measured"] == "2026-12-01"


@pytest.mark.parametrize(
    ("before", "quick", "rules", "said"),
    [
        (replace(FIRST, name="rules"), False, [], "has results of rules"),
        (FIRST, True, [], "has results of a full run, and a quick run has no place in it"),
        (FIRST, False, ["lion"], "has results of all rules, and this run is of lion"),
        (result("H100", [], host=record("H100", rules=("lion",))), False, [], "of lion, and this run is of all rules"),
    ],
)  # fmt: skip
def test_what_may_not_stand_side_by_side_is_refused(before: Result, quick: bool, rules: list[str], said: str) -> None:
    with pytest.raises(RulecError, match=said):
        merge.check(before, "out.json", quick, rules)


def test_the_page_names_the_machine_of_each_part_and_what_is_missing(tmp_path: Path) -> None:
    new = result("H200", [Row("c", "speed", 3.0, part="jax")], jax=record("H200"), states=record("H200", ran=False))
    both = merge.merged(FIRST, new)
    (tmp_path / "gpu.json").write_text(json.dumps(both.data()))
    assert read_result(tmp_path / "gpu.json") == both
    page = results_pages(tmp_path)["gpu"]
    assert "Parts host, muon: measured on 2026-12-01: H100 with 64 GiB" in page
    assert "Parts jax: measured on 2026-12-01: H200 with 64 GiB" in page
    (missing,) = [line for line in page.splitlines() if line.startswith("No run of these parts")]
    assert {"states", "large", "peers"} <= {*missing.removesuffix(".").partition(": ")[2].split(", ")}
    assert not {"host", "muon", "jax"} & {*missing.removesuffix(".").partition(": ")[2].split(", ")}


def test_parts_of_results_from_before_there_were_parts_are_known_by_their_former_names() -> None:
    old = read_result(RECORDED)
    old = replace(old, machine={**old.machine, "seconds": {"reducing rules": 1.0, "host": 1.0}}, parts={})
    old = replace(old, rows=[replace(row, part="") for row in old.rows])
    assert merge.measured_parts(old) == ["host", "reductions"]
