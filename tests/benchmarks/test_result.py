"""Rows, their targets, and results as JSON."""

from __future__ import annotations

import getpass
import json
import platform
import re
from pathlib import Path

import pytest

from benchmarks.result import Result, Row, read_result
from rulec.errors import RulecError
from rulec.tools.compare.measure import cores, facts, last_level_cache


def test_targets_are_met_on_their_side() -> None:
    assert Row("x", "y", 0.95, 0.95).met is True
    assert Row("x", "y", 0.94, 0.95).met is False
    assert Row("x", "y", 0.4, 0.5, "at most").met is True
    assert Row("x", "y", 0.6, 0.5, "at most").met is False
    assert Row("x", "y", 0.6).met is None


def test_a_result_reads_back_as_it_was(tmp_path: Path) -> None:
    result = Result("many", [Row("a", "b", 1.5, 1.0, detail={"seconds": [0.1, 0.2]})], False, 2, ["a note"])
    file = tmp_path / "many.json"
    file.write_text(json.dumps(result.data()))
    assert read_result(file) == result
    assert json.loads(file.read_text())["rows"][0]["met"] is True


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{"nonsense": 1}]}', '{"rows": [], "name": "x"}'])
def test_what_is_no_result_is_said(tmp_path: Path, text: str) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text)
    with pytest.raises(RulecError, match="is no benchmark result"):
        read_result(file)


def test_the_machine_is_described_and_not_named() -> None:
    found = facts()
    words = re.findall(r"[\w./-]+", json.dumps(found))
    assert found["cores"] == cores() >= 1
    assert found["versions"]["numpy"]
    assert {platform.node(), str(Path.home()), getpass.getuser()} & set(words) == set()
    assert last_level_cache() is None or last_level_cache() > 1000
