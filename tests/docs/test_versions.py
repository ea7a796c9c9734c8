"""The tables say which versions they hold for, and a version that is another is named."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from tests.docs import faults_table, names_table, peers, versions
from tests.docs.markdown import ROOT

WRITTEN = {package: versions.public(number) for package, number in peers.read()["versions"].items()}


def test_rows_were_measured_with_the_pinned_versions() -> None:
    """Who raises a pin measures again."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert {package: pins[package] for package in WRITTEN} == WRITTEN
    assert {package: versions.public(version(package)) for package in WRITTEN} == WRITTEN


def test_every_table_names_its_versions() -> None:
    shown = [f"{package} {WRITTEN[package]}" for package in ("torch", "optax", "pytorch_optimizer")]
    assert all(each in faults_table.faults() for each in shown)
    lines = [line.split(" | ") for line in names_table.other_names().splitlines() if line.startswith("| `")]
    rows = {cells[0].strip("| `"): cells[6] for cells in lines if len(cells) == 8}
    assert rows.keys() == names_table.libraries().keys()
    assert rows["torch.optim"] == WRITTEN["torch"]


def test_another_version_is_named() -> None:
    def newest(package: str) -> str:
        return {"heavyball": "99.0"}.get(package, "")

    def installed(package: str) -> str:
        return "99.1" if package == "optax" else version(package)

    said = list(versions.changed(newest, installed))
    assert [line.partition(" is ")[0] for line in said if " is installed" in line] == ["optax 99.1"]
    assert [line.partition(" is ")[0] for line in said if " is out" in line] == ["heavyball 99.0"]
    asked = [library for library in names_table.libraries().values() if library.version and library.package]
    assert (
        len([line for line in said if "no index" in line])
        == sum(bool(library.version) for library in names_table.libraries().values()) - 1
    )
    assert asked


def test_the_same_versions_are_not_named() -> None:
    written = {library.package: library.version for library in names_table.libraries().values() if library.package}
    assert [line for line in versions.changed(written.__getitem__) if "no index" not in line] == []


@pytest.mark.parametrize("printed", ["", "heavyball (4.0.0)\nAvailable versions: 4.0.0, 3.2.1\n"])
def test_the_index_is_asked_by_pip(printed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer:
        stdout = printed

    monkeypatch.setattr(versions.subprocess, "run", lambda *_, **__: Answer)
    assert versions.newest("heavyball") == ("4.0.0" if printed else "")
