"""`rulec new`: what it writes must be a rule."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rulec.cli.new import hides, rule_names
from tests.cli.running import error, run, run_json


@pytest.mark.parametrize("flag", [(), ("--python",)])
def test_what_is_written_is_a_valid_rule(tmp_path: Path, flag: tuple[str, ...]) -> None:
    written = run_json("new", "SlowStart", "--folder", str(tmp_path), *flag)
    path = Path(written["path"])
    assert path == tmp_path / ("slow_start.py" if flag else "slow_start.yaml")
    report = run_json("check", str(path), "--steps", "2")
    assert report["rule"] == "SlowStart"
    assert "ulps" in report["oracle"]["sides"][1]


def test_both_forms_are_the_same_rule(tmp_path: Path) -> None:
    run("new", "twin", "--folder", str(tmp_path))
    run("new", "twin", "--folder", str(tmp_path), "--python")
    text = run("diff", str(tmp_path / "twin.py"), "--against", str(tmp_path / "twin.yaml"), "--steps", "3")
    assert "they agree" in text


@pytest.mark.slow
def test_a_package_installs_and_passes_its_tests(tmp_path: Path) -> None:
    run("new", "SlowStart", "--package", "rulec-mylab", "--folder", str(tmp_path))
    root, site = tmp_path / "rulec-mylab", tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation", "--target", str(site)]
    subprocess.run([*pip, str(root)], check=True)
    environment = dict(os.environ, PYTHONPATH=str(site))
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(root / "tests")]
    done = subprocess.run(tests, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout
    listed = [sys.executable, "-m", "rulec", "list", "slow_start"]
    done = subprocess.run(listed, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1].startswith("slow_start ")


@pytest.mark.parametrize(
    ("package", "options", "message"),
    [
        ("../evil", [], "is no name for a package: use small letters"),
        ("rulec", [], "would hide the module rulec"),
        ("rulec-mylab", ["--python"], "leave --python or --package out"),
        ("class", [], "'class' is a word of Python, and no module can be imported by it"),
        ("import", [], "'import' is a word of Python"),
        ("json", [], "would hide the module json"),
        ("test", [], "would hide the module test"),
        ("numpy", [], "would hide the module numpy"),
        ("rulec-rules", [], "would hide the module rulec_rules"),
        ("rulec_backends", [], "would hide the module rulec_backends"),
        ("tests", [], "would lie where its own tests do"),
        ("p" * 300, [], "has 300 characters: use at most 100"),
        ("-".join(["p"] * 60), [], "has 119 characters: use at most 100"),
    ],
)
def test_what_is_no_package_is_refused(tmp_path: Path, package: str, options: list[str], message: str) -> None:
    assert message in error("new", "mine", "--package", package, "--folder", str(tmp_path), *options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["adamw", "sam", "AdamW", "NAdam"])
def test_a_rule_of_a_package_is_none_of_the_library(name: str, tmp_path: Path) -> None:
    message = error("new", name, "--package", "rulec-mylab", "--folder", str(tmp_path))
    assert "is a rule of the library, which comes before packages: choose another name" in message
    assert list(tmp_path.iterdir()) == []


def test_a_module_in_the_working_folder_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_rule.py").write_text("")
    assert not hides("a_rule")
    run("new", "mine", "--package", "a-rule")
    assert (tmp_path / "a-rule" / "a_rule" / "__init__.py").is_file()


def test_a_package_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "rulec-mylab").mkdir()
    assert "exists already" in error("new", "mine", "--package", "rulec-mylab", "--folder", str(tmp_path))


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    run("new", "mine", "--folder", str(tmp_path))
    file = tmp_path / "mine.yaml"
    file.write_text("precious")
    assert "exists already" in error("new", "mine", "--folder", str(tmp_path))
    assert file.read_text() == "precious"


def test_what_to_do_next_is_said(tmp_path: Path) -> None:
    shown = run("new", "mine", "--folder", str(tmp_path))
    assert f"rulec check {tmp_path / 'mine.yaml'}" in shown
    assert "rulec diff" in shown


@pytest.mark.parametrize(
    ("name", "expected"),
    [("adam", ("adam", "Adam")), ("my_rule", ("my_rule", "MyRule")), ("MyRule", ("my_rule", "MyRule"))],
)
def test_names(name: str, expected: tuple[str, str]) -> None:
    assert rule_names(name) == expected


@pytest.mark.parametrize("name", ["", "a b", "../evil", "2nd", "a/b", "a.yaml"])
def test_what_is_no_name_is_refused(name: str, tmp_path: Path) -> None:
    assert "is not a name for a rule" in error("new", name, "--folder", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("r" * 300, [], "has 300 characters: use at most 100"),
        ("Ab" * 60, ["--python"], "characters"),
        ("lambda", ["--python"], "'lambda' is a word of Python: choose another name, such as 'lambda_'"),
        ("class", [], "'class' is a word of Python"),
        ("types", ["--python"], "types.py would hide the module types from every program beside it"),
        ("rulec", ["--python"], "rulec.py would hide the module rulec"),
        ("numpy", ["--python"], "numpy.py would hide the module numpy"),
        ("rulec_rules", ["--python"], "rulec_rules.py would hide the module rulec_rules"),
        ("médian", ["--python"], "is no name: use letters from a to z"),
    ],
)
def test_a_name_that_no_rule_or_module_can_have(name: str, options: list[str], message: str, tmp_path: Path) -> None:
    assert message in error("new", name, *options, "--folder", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written" in error("new", "mine", "--folder", str(tmp_path / "file" / "below"))
