"""Every requirement has a floor, and every floor was tried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.versions import steps
from tests.versions.__main__ import RECORD, constraints, recorded
from tests.versions.requirements import CORE, floor, oldest, pins, requirements

RECORDED = json.loads(RECORD.read_text())


def test_every_floor_was_tried() -> None:
    """Who changes a floor runs `make floors ARGS=--write`."""
    floors: dict[str, Version] = {}
    for lines in requirements().values():
        for line in lines:
            name = canonicalize_name(line.name)
            floors[name] = max(Version(floor(line)), floors.get(name, Version("0")))
    assert {name: Version(each["version"]) for name, each in RECORDED["oldest"].items()} == floors


def test_newest_is_not_below_the_pins() -> None:
    pinned = pins()
    assert RECORDED["newest"].keys() == RECORDED["oldest"].keys()
    newest = {name: Version(each["version"]) for name, each in RECORDED["newest"].items()}
    behind = [name for name, version in newest.items() if name in pinned and version < Version(pinned[name])]
    assert behind == []


def test_every_extra_has_a_program() -> None:
    assert set(steps.PROGRAMS) == set(requirements())


def test_a_requirement_without_a_floor_is_named() -> None:
    with pytest.raises(ValueError, match=r"^numpy has no lower bound in pyproject\.toml$"):
        floor(Requirement("numpy<3"))


def test_the_higher_of_two_floors_is_taken(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["a>=1.9"]\n'
        '[project.optional-dependencies]\nx = ["A>=1.10"]\ny = ["b>=2; sys_platform == \'none\'"]\ndev = ["c"]\n'
    )
    assert oldest(["x", "y"], tmp_path) == ["a==1.10"]
    assert oldest([], tmp_path) == ["a==1.9"]


def test_newest_holds_torch_alone() -> None:
    assert constraints("newest", ["torch"]) == [f"torch=={pins()['torch']}"]
    assert "numpy==2.0" in constraints("oldest", [])


def test_components_that_were_not_tried_stay_in_the_record() -> None:
    now = {"a": {"version": "2", "python": "3.13"}}
    before = {"oldest": {}, "newest": {"b": {"version": "1", "python": "3.11"}, "a": {}}}
    assert recorded(before, "newest", now) == {"oldest": {}, "newest": {"a": now["a"], "b": before["newest"]["b"]}}
    assert CORE in requirements()
