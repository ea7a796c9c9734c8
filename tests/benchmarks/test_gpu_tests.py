"""Tests that pytest runs as a piece of the measurement: each counts when it is over, with its reason."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import reports
from benchmarks.gpu import tests as gpu_tests
from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Checked, Findings
from rulec.errors import RulecError
from tests.benchmarks.gpu_fakes import HostDevice

SOME = """
import pytest
pytestmark = pytest.mark.gpu

@pytest.fixture
def broken():
    raise OSError("no device\\nand more")

@pytest.fixture
def late():
    yield
    raise OSError("too late")

def test_passes(): pass
def test_fails(): assert 1 == 2
@pytest.mark.skip(reason="needs more")
def test_is_skipped(): pass
def test_cannot_begin(broken): pass
def test_ends_badly(late): pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with the project's packages and a file of tests, without its settings of pytest."""
    (tmp_path / "benchmarks").symlink_to(gpu_tests.ROOT / "benchmarks")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: of a device\n")
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_tests, "FILES", {"some": ("test_some.py",)})
    return tmp_path


def found() -> list[Checked]:
    return [one for one in gpu_tests.tests(Bench(True, HostDevice()), "some") if isinstance(one, Checked)]


def test_every_test_is_a_finding_with_its_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests, "_has", lambda package: False)
    (folder / "test_some.py").write_text(SOME)
    listed = {(one.rule, one.fault, one.refused) for one in found()}
    assert listed == {
        ("test_some.py::test_passes", None, None),
        ("test_some.py::test_fails", "assert 1 == 2", None),
        ("test_some.py::test_is_skipped", None, "Skipped: needs more"),
        ("test_some.py::test_cannot_begin", "OSError: no device", None),
        ("test_some.py::test_ends_badly", None, None), ("test_some.py::test_ends_badly", "OSError: too late", None),
    }  # fmt: skip


def test_several_processes_tell_each_test_once(folder: Path) -> None:
    (folder / "test_some.py").write_text(SOME)
    findings = Findings()
    for one in found():
        findings.add(one)
    (row,) = findings.correctness()
    assert (row.what, row.value, row.target) == ("some: tests that pass", 1, 4)
    assert {*row.detail["failed"]} == {f"test_some.py::test_{n}" for n in ("fails", "cannot_begin", "ends_badly")}
    assert row.detail["refused"] == {"test_some.py::test_is_skipped": "Skipped: needs more"}
    assert len(findings.checked) == 6


def test_files_that_cannot_be_read_fail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests, "_has", lambda package: False)
    (folder / "test_some.py").write_text("import no_such_module\n")
    listed: list[Any] = []
    with pytest.raises(RulecError, match="pytest ended with 2: "):
        listed.extend(gpu_tests.tests(Bench(True, HostDevice()), "some"))
    assert [(one.rule, one.refused) for one in listed] == [("test_some.py", None)]
    assert listed[0].fault == "ModuleNotFoundError: No module named 'no_such_module'"
    (folder / "test_some.py").unlink()
    with pytest.raises(RulecError, match=r"pytest ended with 4: ERROR: file or directory not found: test_some\.py"):
        found()


def test_plugins_are_used_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests, "cores", lambda: 16)
    monkeypatch.setattr(gpu_tests, "_has", lambda package: True)
    words = gpu_tests.command(["a.py"])
    assert words[-5:] == ["-n", "8", "--timeout", "60", "a.py"]
    assert words[words.index("-m", 2) + 1] == "gpu"
    monkeypatch.setattr(gpu_tests, "_has", lambda package: False)
    assert not {"-n", "--timeout"} & {*gpu_tests.command(["a.py"])}
    assert gpu_tests.missing() == "pytest, to run tests on the GPU with, is not installed"


def test_only_the_process_that_gathers_reports_tells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    config = SimpleNamespace(pluginmanager=SimpleNamespace(register=registered.append))
    monkeypatch.delenv(reports.PIPE, raising=False)
    reports.pytest_configure(config)
    monkeypatch.setenv(reports.PIPE, "7")
    reports.pytest_configure(SimpleNamespace(**vars(config), workerinput={}))
    assert registered == []
    reports.pytest_configure(config)
    (teller,) = registered
    told: list[Any] = []
    monkeypatch.setattr(reports.os, "write", lambda *given: told.append(given))
    teller.pytest_runtest_logreport(SimpleNamespace(when="teardown", passed=True))
    teller.pytest_runtest_logreport(
        SimpleNamespace(when="call", passed=True, nodeid="a", outcome="passed", longrepr=None)
    )
    assert told == [(7, b'{"test": "a", "outcome": "passed", "said": ""}\n')]
