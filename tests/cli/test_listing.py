"""`rulec list`."""

from __future__ import annotations

import rulec
from tests.cli.running import run, run_json


def test_every_rule_of_the_library_is_listed_once() -> None:
    entries = {entry["name"]: entry for entry in run_json("list")}
    assert sorted(entries) == rulec.rules()
    assert entries["adamw"]["states"] == {"m": "element", "v": "element"}
    assert entries["adamw"]["state_bytes_per_parameter"] == 8
    assert entries["nadam"]["states"]["mu_product"] == "tensor"
    assert entries["nadam"]["state_bytes_per_parameter"] == 8
    assert entries["transforms/clip_by_value"]["kind"] == "transform"
    assert entries["adam"]["year"] == 2015


def test_the_table_has_a_line_for_each_with_what_people_look_for() -> None:
    heading, *lines = run("list").splitlines()
    assert heading.split()[:4] == ["rule", "year", "states", "bytes/parameter"]
    assert len(lines) == len(rulec.rules())
    lion = next(line for line in lines if line.startswith("lion "))
    assert lion.split()[1:4] == ["2023", "m", "4"]
    assert lion.endswith(rulec.load("lion").summary)
    assert [line for line in lines if line != line.rstrip()] == []
