"""`rulec list`."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import rulec
from rulec.cli.console import print_table
from tests.cli.running import error, run, run_json


def test_every_rule_of_the_library_is_listed_once() -> None:
    entries = {entry["name"]: entry for entry in run_json("list")}
    assert sorted(entries) == rulec.rules()
    assert entries["adamw"]["states"] == {"m": "element", "v": "element"}
    assert entries["adamw"]["state_bytes_per_parameter"] == 8
    assert entries["nadam"]["states"]["mu_product"] == "tensor"
    assert entries["nadam"]["state_bytes_per_parameter"] == 8
    assert entries["transforms/clip_by_value"]["kind"] == "transform"
    assert entries["adam"]["year"] == 2015
    scopes = {"adamw": "elementwise", "lamb": "tensor", "muon": "tensor", "transforms/clip_by_global_norm": "model"}
    assert {name: entries[name]["scope"] for name in scopes} == scopes
    assert (entries["sophia"]["inputs"], entries["adam"]["hyper"]["beta1"]) == (["hessian"], 0.9)
    assert entries["muon"]["file"].endswith("muon.yaml")
    assert "\nname: " in f"\n{Path(entries['muon']['file']).read_text()}"


def test_the_table_has_a_line_for_each_with_what_people_look_for() -> None:
    heading, *lines = run("list").splitlines()
    assert heading.split() == ["rule", "year", "bytes", "summary"]
    assert len(lines) == len(rulec.rules())
    lion = next(line for line in lines if line.startswith("lion "))
    assert lion.split()[1:3] == ["2023", "4"]
    assert lion.endswith(rulec.load("lion").summary)
    assert [line for line in lines if line != line.rstrip()] == []


def test_a_pattern_chooses_by_name_and_summary() -> None:
    assert {entry["name"] for entry in run_json("list", "sgd*")} >= {"sgd"}
    assert all("adam" in entry["name"] + entry["summary"].lower() for entry in run_json("list", "ADAM"))
    assert [entry["name"] for entry in run_json("list", "lio?")] == ["lion"]
    assert "no rule has 'nothing [of this]' in its name or summary" in error("list", "nothing [of this]")


def test_a_terminal_has_one_line_for_each_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    text = StringIO()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("rulec.cli.console.console", lambda: Console(file=text, width=80))
    print_table(("rule", "summary"), [["lion", "a " * 60], ["adam", "b"]], one_line=True)
    lines = text.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["rule", "lion", "adam"]
    assert max(map(len, lines)) <= 80
