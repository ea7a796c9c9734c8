"""What commands are given: rules by name, file and composition; numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

import rulec
from rulec.cli.arguments import check_dtype, find_rule, numbers
from rulec.errors import RulecError, RuleError

PYTHON = """
import rulec

@rulec.rule(state=dict(m=0))
def one(g, s, *, lr=1e-3, beta=0.9):
    s.m = beta*s.m + (1 - beta)*g
    return s.m
"""


def test_a_rule_is_found_by_name_and_by_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(rulec.load("lion").to_yaml())
    assert find_rule("lion").name == find_rule(str(file)).name == "Lion"


def test_composition_reads_as_python_would() -> None:
    text = find_rule("l2 >> adam + decay")
    plain = rulec.load("l2") >> (rulec.load("adam") + rulec.load("decay"))
    assert text.step == plain.step
    assert text.hyper == plain.hyper
    assert text.step != ((rulec.load("l2") >> rulec.load("adam")) + rulec.load("decay")).step


def test_what_is_composed_can_still_be_compared() -> None:
    assert find_rule("l2 >> nadam").interop == rulec.load("nadam").interop


def test_wrappers_files_and_bindings_are_composed_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PYTHON)
    found = find_rule(f"clip_by_value(bound=0.5) >> lookahead({file}:one, k=3)")
    wanted = rulec.load("clip_by_value").bind(bound=0.5) >> rulec.load("lookahead")(find_rule(str(file)), k=3)
    assert found == wanted
    assert not find_rule("lookahead(adam)").interop
    with pytest.raises(RuleError, match=r"^<rule>:1:11: there is no rule 'adem'; did you mean 'adam'"):
        find_rule("lookahead(adem)")


def test_a_python_rule_is_found_by_its_name_or_as_the_only_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PYTHON)
    assert find_rule(f"{file}:one").name == find_rule(str(file)).name == "One"
    file.write_text(PYTHON + PYTHON.replace("def one", "def two"))
    with pytest.raises(RuleError, match="has the rules one, two; name one of them"):
        find_rule(str(file))
    with pytest.raises(RuleError, match="has no rule 'tow'; did you mean 'two'"):
        find_rule(f"{file}:tow")


def test_a_python_file_without_a_rule_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "empty.py"
    file.write_text("")
    with pytest.raises(RuleError, match=r"decorate a function with @rulec\.rule"):
        find_rule(str(file))
    with pytest.raises(RuleError, match="there is no Python file"):
        find_rule(str(tmp_path / "missing.py"))


def test_numbers() -> None:
    assert numbers(["lr=1e-2", " beta1 = 0.5"], "--hyper") == {"lr": 0.01, "beta1": 0.5}
    assert numbers(None, "--hyper") == {}


@pytest.mark.parametrize("text", ["lr", "lr=", "=1", "lr=fast", ""])
def test_what_is_no_number_is_said(text: str) -> None:
    with pytest.raises(RulecError, match=r"is not NAME=NUMBER, as in --hyper lr=0\.01"):
        numbers([text], "--hyper")


def test_dtypes() -> None:
    assert check_dtype("bfloat16") == "bfloat16"
    with pytest.raises(RulecError, match="there is no dtype 'flaot32'; did you mean 'float32'"):
        check_dtype("flaot32")
