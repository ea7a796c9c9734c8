"""Mistakes in rules written as Python functions, from a table, and errors where there is no source to show."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import rulec
import rulec.math
from rulec import RuleError
from tests.language.test_mistakes import excerpt

TABLE: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "mistakes_python.yaml").read_text("utf-8"))

#: What the texts of the table may name.
NAMES = {
    "math": math, "np": np, "torch": torch, "rulec": rulec, "rm": rulec.math, "where": rulec.math.where,
    "adam": rulec.load("adam"), "rprop": rulec.load("rprop"),
}  # fmt: skip


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["case"])
def test_message_place_and_caret(row: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "rule.py"
    file.write_text(row["text"], "utf-8")
    with pytest.raises(RuleError) as caught:
        runpy.run_path(str(file), init_globals=NAMES)
    if "at" in row:
        assert str(caught.value) == f"{file}:{row['at']}: {row['says']}{excerpt(row['text'], row['at'], row['marked'])}"
    else:
        assert str(caught.value) == row["says"]


def error_of(make: Any) -> str:
    with pytest.raises(RuleError) as caught:
        make()
    return str(caught.value)


def test_no_function() -> None:
    assert error_of(lambda: rulec.rule(3)) == "rulec.rule makes a rule of a function, not of 3"  # type: ignore[call-overload]
    assert error_of(lambda: rulec.rule(dict)) == "rulec.rule makes a rule of a function, not of <class 'dict'>"


def test_without_source() -> None:
    """A function typed into a shell has no source to show: what is wrong is still said, and the line's number."""
    names: dict[str, Any] = {"rulec": rulec}
    code = compile("@rulec.rule\ndef f(g):\n    return len(g)\n", "<shell>", "exec")
    says = "<shell>:3:1: a traced value has no parts: a rule works on all elements at once"
    assert error_of(lambda: exec(code, names)) == says  # noqa: S102 - the text stands above


def test_errors_of_the_author_pass() -> None:
    def broken(g: Any) -> Any:
        return undefined * g  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(NameError):
        rulec.rule(broken)
    # A rule that failed leaves no trace behind.
    assert rulec.rule(lambda g: 2 * g).step_text() == "direction = 2*g"


ADAM = rulec.load("adam")
UNTRUE = "bind to numbers and hyper-parameters only"


@pytest.mark.parametrize(
    ("bindings", "says"),
    [
        ({"beta": 1}, "Adam has no hyper-parameter 'beta'; did you mean 'beta2'?"),
        ({"beta1": None}, "beta1 of Adam is bound to a number or an expression, not to None"),
        ({"beta1": [1]}, "beta1 of Adam is bound to a number or an expression, not to [1]"),
        ({"beta1": 1}, "beta1=1 of Adam must be at least 0 and below 1"),
        ({"beta1": "1.5"}, "beta1=1.5 of Adam must be at least 0 and below 1"),
        ({"beta1": float("nan")}, "beta1=nan of Adam must be at least 0 and below 1"),
        ({"beta1": "2*"}, "<binding of beta1>:1:3: something is missing at the end of this line\n    2*\n      ^"),
        (
            {"beta1": "a = 2"},
            "<binding of beta1>:1:1: write one expression here, without a name and = before it\n    a = 2\n    ^^^^^",
        ),
        ({"beta1": ""}, "<binding of beta1>:1:1: write one expression here, without a name and = before it"),
        ({"beta1": "1/m"}, f"<binding of beta1>:1:3: 'm' is a state of Adam: {UNTRUE}\n    1/m\n      ^"),
        ({"eps": "g"}, f"<binding of eps>:1:1: 'g' is the gradient: {UNTRUE}\n    g\n    ^"),
        ({"eps": "t"}, f"<binding of eps>:1:1: 't' is the step count: {UNTRUE}\n    t\n    ^"),
        ({"eps": "rows"}, f"<binding of eps>:1:1: 'rows' is a shape fact: {UNTRUE}\n    rows\n    ^^^^"),
        ({"eps": "p"}, f"<binding of eps>:1:1: 'p' is the parameter: {UNTRUE}\n    p\n    ^"),
        ({"eps": "sqrt"}, "<binding of eps>:1:1: 'sqrt' is a function: write sqrt(x)\n    sqrt\n    ^^^^"),
        (
            {"eps": "sum(eps)"},
            "<binding of eps>:1:1: sum cannot be part of a binding: use elementwise functions\n"
            "    sum(eps)\n    ^^^^^^^^",
        ),
    ],
    ids=str,
)
def test_bindings(bindings: dict[str, Any], says: str) -> None:
    assert error_of(lambda: ADAM.bind(**bindings)) == says


def test_composition() -> None:
    decay, rprop, rmsprop, asgd = map(rulec.load, ("decay", "rprop", "rmsprop", "asgd"))
    deaf = "Decay never reads its input g, so Adam before it would have no effect: did you mean adam + decay?"
    assert error_of(lambda: ADAM >> decay) == deaf
    alone = "use it alone or last in a chain"
    assert error_of(lambda: asgd + rprop) == "ASGD and Rprop both assign p: only one of added rules may"
    assert error_of(lambda: rprop >> ADAM) == f"Rprop assigns p itself, so it cannot be followed by another: {alone}"
    assert error_of(lambda: ADAM + rmsprop) == (
        "Adam and RMSprop both have a hyper-parameter 'lr', with the defaults 0.001 and 0.01: "
        "bind one of them to a number or to another name"
    )
    assert error_of(ADAM.bind(eps="2*delta").standalone) == (
        "hyper-parameter 'delta' of Adam has no default: bind it to a number"
    )
    assert error_of(lambda: ADAM(3)) == (
        "Adam can be called inside the function of another rule; to run it use rulec.array.Optimizer or "
        "rulec.torch.optimizer"
    )
    with pytest.raises(TypeError):
        ADAM + 3  # type: ignore[operator]
    with pytest.raises(TypeError):
        ADAM >> 3  # type: ignore[operator]
