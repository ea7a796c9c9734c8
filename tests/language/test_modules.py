"""Rules in Python files, in modules, and of installed packages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rulec
import rulec.torch
from rulec.errors import RuleError
from rulec.language import library, modules

PYTHON = '''
import rulec

@rulec.rule
def tempered(g, t, *, lr=1e-3):
    """A rule of a test."""
    return g
'''

#: A package by its name -> the text of its module, and the lines of its entry points.
Add = Callable[[str, str, str], None]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """Installs packages: a module, and the metadata that an installer writes."""
    monkeypatch.syspath_prepend(tmp_path)

    def package(name: str, text: str, lines: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        metadata = tmp_path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{modules.GROUP}]\n{lines}\n")
        forget()

    yield package
    monkeypatch.undo()
    forget()


def forget() -> None:
    """What packages are installed is looked up anew."""
    for cached in (modules.installed, library.rules, library.installed_titles):
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tempered = 1", "a_lab_package:tempered of a_lab_package is no rule, but of type int"),
        ("raise ValueError('out of date')", "rule 'lab' of a_lab_package cannot be loaded: out of date"),
    ],
)
def test_a_broken_package_is_named(add: Add, text: str, message: str) -> None:
    add("a_lab_package", text, "lab = a_lab_package:tempered")
    with pytest.raises(RuleError, match=f"^{message}"):
        rulec.load("lab")
    assert rulec.load("lion").name == "Lion"


def test_two_packages_with_one_name_are_named(add: Add) -> None:
    add("a_lab_package", PYTHON, "lab = a_lab_package:tempered")
    add("another_lab", PYTHON, "lab = another_lab:tempered")
    with pytest.raises(RuleError, match="several packages add a rule 'lab': uninstall all but one of a_lab_package, "):
        rulec.load("lab")
