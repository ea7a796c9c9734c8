"""Rules in Python files, in modules, and of installed packages."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import rulec
import rulec.torch
from rulec.backend import registry
from rulec.cli import doctor
from rulec.errors import BackendUnavailable, RuleError
from rulec.language.library import load, modules
from tests.cli.running import run_json

PYTHON = '''
import rulec

@rulec.rule
def tempered(g, t, *, lr=1e-3):
    """A rule of a test."""
    return g
'''

#: A package by its name -> the text of its module, the lines of its entry points, and those of other groups.
Add = Callable[..., None]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """Installs packages: a module, and the metadata that an installer writes."""
    monkeypatch.syspath_prepend(tmp_path)

    def package(name: str, text: str, lines: str, more: str = "") -> None:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        metadata = tmp_path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        entries = f"[{modules.GROUP}]\n{lines}\n{more}\n"
        (metadata / "entry_points.txt").write_text(entries, encoding="latin-1")
        forget()

    yield package
    monkeypatch.undo()
    forget()


def forget() -> None:
    """What packages are installed is looked up anew."""
    caches: list[Any] = [modules.installed, load.rules, load.installed_titles, load._installed_rules]
    for cached in [*caches, registry._entry_points, registry.get]:
        cached.cache_clear()


def test_a_module_and_a_file_are_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_lab.py").write_text(PYTHON)
    monkeypatch.syspath_prepend(tmp_path)
    loaded = rulec.load("a_lab:tempered")
    assert loaded == rulec.load(f"{tmp_path}/a_lab.py:tempered") == rulec.load(f"{tmp_path}/a_lab.py")
    composed = rulec.load("clip_by_value >> lookahead(a_lab:tempered, k=3)")
    assert composed == rulec.load("clip_by_value") >> rulec.load("lookahead")(loaded, k=3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a_lab_nobody_has:rule", "there is no module 'a_lab_nobody_has': install it"),
        ("rulec.nothing:rule", r"there is no module 'rulec\.nothing'"),
        ("rulec.math:adamw", r"rulec\.math has no rule 'adamw'"),
        ("nowhere.py:rule", r"there is no Python file 'nowhere\.py'"),
    ],
)
def test_what_is_not_there_is_said(name: str, message: str) -> None:
    with pytest.raises(RuleError, match=f"^{message}"):
        rulec.load(name)


def test_a_module_that_lacks_another_is_not_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_broken_lab.py").write_text("import a_module_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_nobody_has"):
        rulec.load("a_broken_lab:rule")


def test_a_rule_file_runs_no_python(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('this ran')\n")
    (tmp_path / "mine.yaml").write_text("name: Mine\nplus: [adam, evil.py:rule]\n")
    with pytest.raises(RuleError, match=r"evil\.py:rule"):
        rulec.load(tmp_path / "mine.yaml")


def test_a_package_adds_rules(add: Add) -> None:
    add("a_lab_package", PYTHON, "tempered_by_lab = a_lab_package:tempered")
    assert "tempered_by_lab" in rulec.rules()
    assert rulec.load("tempered_by_lab").name == "Tempered"
    assert rulec.load("tempered_by_lab + decay").hyper.keys() == {"lr", "weight_decay"}
    assert rulec.torch.Tempered is rulec.torch.optimizer("tempered_by_lab")  # type: ignore[attr-defined]


def test_the_library_comes_before_packages(add: Add) -> None:
    add("a_lab_package", PYTHON, "adamw = a_lab_package:tempered")
    assert rulec.load("adamw").name == "AdamW"
    assert rulec.rules().count("adamw") == 1


#: What a package may do wrong: the text of its module, its line, and what is then said of its rule.
FAULTS: dict[str, tuple[str, str, str]] = {
    "no rule": ("tempered = 1", "lab = {0}:tempered", "{0}:tempered of {0} is no rule, but of type int"),
    "an error": ("raise ValueError('out of date')", "lab = {0}:tempered", "rule 'lab' of {0} cannot be loaded: out of"),
    "no words": ("raise ValueError", "lab = {0}:tempered", "rule 'lab' of {0} cannot be loaded: ValueError$"),
    "exit": ("import sys; sys.exit(3)", "lab = {0}:tempered", r"rule 'lab' of {0} .*: it would end the process, .*\(3"),
    "quit": ("raise SystemExit", "lab = {0}:tempered", r"rule 'lab' of {0} .*: it would end the process, by .*\(\)"),
    "no Exception": ("class E(BaseException): ...\nraise E('x')", "lab = {0}:tempered", "rule 'lab' of {0} .*: x"),
    "speechless": (
        "class E(Exception):\n    def __str__(self): raise self\nraise E", "lab = {0}:tempered",
        "rule 'lab' of {0} .*: E$",
    ),
    "syntax": ("def", "lab = {0}:tempered", "rule 'lab' of {0} cannot be loaded: "),
    "recursion": ("def f(): f()\nf()", "lab = {0}:tempered", "rule 'lab' of {0} cannot be loaded: maximum recursion"),
    "no module": ("", "lab = {0}_nobody_has:tempered", "rule 'lab' of {0} cannot be loaded: No module named"),
    "no attribute": ("", "lab = {0}:tempered", "rule 'lab' of {0} cannot be loaded: "),
    "no reference": ("", "lab = a b c", "rule 'lab' of {0} cannot be loaded: "),
    "asks for others": (
        "import rulec.torch\nrulec.torch.Nothing", "lab = {0}:tempered",
        "rule 'lab' of {0} cannot be loaded: module 'rulec.torch' has no attribute 'Nothing'",
    ),
    "no line": ("", "lab", "there is no rule 'lab'"),
    "no text": ("", "lab = \xff\xfe", "there is no rule 'lab'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_of_a_package_stays_with_its_name(fault: str, add: Add, capsys: pytest.CaptureFixture[str]) -> None:
    text, line, message = FAULTS[fault]
    add("a_lab_package", text, line.format("a_lab_package"))
    add("z_lab_package", PYTHON, "fine = z_lab_package:tempered")
    with pytest.raises(RuleError, match=f"^{message.format('a_lab_package')}"):
        rulec.load("lab")
    check_others(capsys)


def check_others(capsys: pytest.CaptureFixture[str]) -> None:
    """Everything but the name with a fault is as it would be without it."""
    import rulec.mlx

    assert rulec.load("lion").name == "Lion"
    assert rulec.load("fine").name == "Tempered"
    assert "fine" in rulec.rules()
    assert "fine" in rulec.rules(wrappers=False)
    for adapter in (rulec.torch, rulec.mlx):
        assert adapter.AdamW.__name__ == "AdamW"
        assert adapter.Tempered.__name__ == "Tempered"  # type: ignore[attr-defined]
        assert not hasattr(adapter, "nosuch")
        assert not hasattr(adapter, "_nosuch")
        assert {"AdamW", "Tempered"} <= {*dir(adapter)}
    few = [name for name in rulec.rules() if name in ("lion", "fine", "lab")]
    with mock.patch.object(rulec, "rules", return_value=few):
        assert [entry["name"] for entry in run_json("list", "A rule of a test")] == ["fine"]
    assert capsys.readouterr().out == ""


def test_an_attribute_that_is_not_there_tells_of_rules_that_cannot_be_loaded(add: Add) -> None:
    add("a_lab_package", "raise ValueError", "lab = a_lab_package:tempered")
    with pytest.raises(AttributeError, match=r"no attribute 'Lab'; rules .* that cannot be loaded are 'lab': rulec\.l"):
        rulec.torch.Lab  # type: ignore[attr-defined]  # noqa: B018


def test_two_packages_with_one_name_are_named(add: Add, capsys: pytest.CaptureFixture[str]) -> None:
    add("a_lab_package", "", "lab = a_lab_package:tempered")
    add("another_lab", "", "lab = another_lab:tempered")
    add("z_lab_package", PYTHON, "fine = z_lab_package:tempered")
    with pytest.raises(RuleError, match="several packages add a rule 'lab': uninstall all but one of a_lab_package, "):
        rulec.load("lab")
    check_others(capsys)


def test_two_rules_with_one_name_in_their_texts(add: Add) -> None:
    add("a_lab_package", PYTHON, "lab = a_lab_package:tempered")
    add("another_lab", PYTHON, "other = another_lab:tempered")
    assert rulec.load("lab").name == rulec.load("other").name == "Tempered"
    assert not hasattr(rulec.torch, "Tempered")
    with pytest.raises(AttributeError, match=r"for the rules 'lab' and 'other' of .* are called so: use rulec\.torch"):
        rulec.torch.Tempered  # type: ignore[attr-defined]  # noqa: B018


def test_no_package_takes_the_keyboard_away(add: Add) -> None:
    add("a_lab_package", "raise KeyboardInterrupt", "lab = a_lab_package:tempered")
    with pytest.raises(KeyboardInterrupt):
        rulec.load("lab")


#: A package that adds a backend -> what is then said of it.
BACKENDS = {
    "import sys; sys.exit(3)": "backend 'lab' of a_lab_package cannot be loaded: it would end the process",
    "raise OSError('no driver')": "backend 'lab' of a_lab_package cannot be loaded: no driver",
    "def tempered(): raise ValueError('no device')": "backend 'lab' of a_lab_package cannot be made: no device",
    "def tempered(): exit(1)": "backend 'lab' of a_lab_package cannot be made: it would end the process",
    "tempered = int": "a_lab_package:tempered of a_lab_package is no backend, for it has no name: give",
    """
class tempered:
    name = "lab"
    def unavailable_reason(self): raise ValueError("hm")
    def emit(self): ...
    def build(self): ...
""": "backend 'lab' cannot run here: it fails to say whether it can run: hm",
}


@pytest.mark.parametrize("text", BACKENDS)
def test_the_fault_of_a_backend_stays_with_its_name(text: str, add: Add) -> None:
    add("a_lab_package", text, "", f"[{registry.GROUP}]\nlab = a_lab_package:tempered\ncpu = a_lab_package:tempered")
    with pytest.raises(BackendUnavailable, match=f"^{re.escape(BACKENDS[text])}"):
        registry.usable("lab")
    assert registry.usable("cpu").name == "cpu"
    assert "lab" in registry.names()
    reasons = doctor._backends()
    assert reasons["numpy"] is None
    assert BACKENDS[text].removeprefix("backend 'lab' cannot run here: ") in (reasons["lab"] or "")


def test_two_packages_with_one_backend(add: Add) -> None:
    for name in ("a_lab_package", "another_lab"):
        add(name, "", "", f"[{registry.GROUP}]\nlab = {name}:tempered")
    with pytest.raises(BackendUnavailable, match="several packages add a backend 'lab': uninstall all but one of a"):
        registry.get("lab")
