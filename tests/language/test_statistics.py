"""Statistics in the language: declared by rules, kept by compositions, asked for from outside, and their mistakes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import rulec
from rulec import Rule, RuleError
from rulec.checkpoint.content import meaning
from rulec.language.expr.text import expression_text
from rulec.language.statistics import NORMS, watched

RULE = """
name: Watched
hyper: {beta: 0.9}
state: {m: 0}
statistics:
  agree: mean(where(m*g > 0, 1, 0))
  largest: max(abs(update))
step: |
  m = beta*m + g
  direction = m
"""


def texts(rule: Rule) -> dict[str, str]:
    return {key: expression_text(each.value) for key, each in rule.statistics.items()}


def test_a_rule_file_declares_statistics_and_keeps_them_in_its_own_text() -> None:
    rule = rulec.parse(RULE)
    assert list(rule.statistics) == ["agree", "largest"]
    again = rulec.parse(rule.to_yaml())
    assert texts(again) == texts(rule)
    assert again == rule


def test_a_rule_in_python_declares_statistics() -> None:
    @rulec.rule(state={"m": 0}, statistics={"agree": "mean(where(m*g > 0, 1, 0))"})
    def pushed(g, s, *, beta=0.9):  # type: ignore[no-untyped-def]
        s.m = beta * s.m + g
        return s.m

    assert texts(pushed) == {"agree": 'mean(where(m*g > 0, 1, 0), per="tensor")'}
    with pytest.raises(RuleError, match=r"the statistic agree of Wrong is 'norm\(n\)': unknown name 'n'"):
        rulec.rule(name="Wrong", statistics={"agree": "norm(n)"})(lambda g: g)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("adam + {rule}", ["watched.agree", "watched.largest"]),
        ("{rule} >> adam", ["watched.agree", "watched.largest"]),
        ("lookahead({rule})", ["distance", "watched.agree", "watched.largest"]),
    ],
)
def test_composed_rules_keep_the_statistics_of_their_parts(text: str, names: list[str]) -> None:
    rule = rulec.parse(RULE)
    composed = {
        "adam + {rule}": lambda: rulec.load("adam") + rule,
        "{rule} >> adam": lambda: rule >> rulec.load("adam"),
        "lookahead({rule})": lambda: rulec.load("lookahead")(rule),
    }[text]()
    assert list(composed.statistics) == names
    rulec.compile(composed, watch=watched(composed, names))


def test_names_in_statistics_follow_the_names_of_a_composition() -> None:
    both = rulec.parse(RULE) >> rulec.load("adam")
    assert both.state.keys() == {"watched.m", "adam.m", "v"}
    assert texts(both)["watched.agree"] == 'mean(where(watched.m*g > 0, 1, 0), per="tensor")'


def test_the_input_of_a_part_is_its_gradient_in_its_statistics() -> None:
    second = rulec.load("adam") >> rulec.parse(RULE)
    assert "adam.direction" in texts(second)["watched.agree"]


def test_a_rule_that_is_called_keeps_its_statistics(tmp_path: Path) -> None:
    (tmp_path / "watched.yaml").write_text(RULE)
    (tmp_path / "caller.yaml").write_text("name: Caller\nuses: [watched.yaml]\nstep: |\n  direction = 2*watched(3*g)\n")
    caller = rulec.load(tmp_path / "caller.yaml")
    assert texts(caller)["watched.agree"] == 'mean(where(watched.m*(3*g) > 0, 1, 0), per="tensor")'
    rulec.compile(caller, watch=watched(caller, ["watched.agree", "largest"]))


def test_a_bound_hyper_parameter_is_bound_in_statistics() -> None:
    rule = rulec.parse(RULE.replace("max(abs(update))", "beta*norm(m)")).bind(beta="1 - c")
    assert "beta" not in texts(rule)["largest"]
    assert "c" in texts(rule)["largest"]


def test_statistics_are_no_part_of_what_a_rule_computes() -> None:
    rule = rulec.parse(RULE)
    assert meaning(rule) == meaning(replace(rule, statistics={}))


def test_a_watch_is_a_set_a_name_names_or_expressions() -> None:
    rule = rulec.parse(RULE)
    assert [name for name, _ in watched(rule, "norms")] == [*NORMS]
    assert [name for name, _ in watched(rule, "agree")] == ["agree"]
    assert [name for name, _ in watched(rule, ["largest", "norms"])] == ["largest", *NORMS]
    assert [name for name, _ in watched(rule, {"mine": "norm(m)"})] == ["mine"]
    assert [name for name, _ in watched(rule + rulec.load("decay"), "agree")] == ["agree"]
    assert watched(rule, None) == ()


@pytest.mark.parametrize(
    ("watch", "message"),
    [
        ("normz", "Watched has no statistic 'normz'; did you mean 'norms'?"),
        ({"x": "norm(updat)"}, "unknown name 'updat' in the statistic x; did you mean 'update'?"),
        ({"x": "m*g"}, "the statistic x differs from element to element: reduce it, as in mean(x) or rms(x)"),
        ({"x": "sum(normal([rows, cols], at=t))"}, "the statistic x draws random numbers"),
        ({"x": 3}, "the statistic x is an expression in quotes, such as 'norm(update)', not 3"),
        ({"x y": "norm(g)"}, "a statistic cannot have this name: 'x y' is no name"),
        ({"x": "norm(g"}, "this bracket is never closed"),
    ],
)
def test_a_mistake_in_a_watch_is_one_sentence(watch: object, message: str) -> None:
    rule = rulec.parse(RULE)
    with pytest.raises(RuleError) as raised:
        rulec.compile(rule, watch=watched(rule, watch))  # type: ignore[arg-type]
    assert message in str(raised.value)


def test_a_mistake_in_a_declared_statistic_has_its_place() -> None:
    with pytest.raises(RuleError) as raised:
        rulec.parse(RULE.replace("max(abs(update))", "max(abs(updat))"))
    assert ":7:20: unknown name 'updat' in the statistic largest" in str(raised.value)


def test_two_parts_with_one_statistic_ask_for_its_whole_name() -> None:
    first, second = rulec.parse(RULE), rulec.parse(RULE.replace("Watched", "Other"))
    with pytest.raises(RuleError, match=r"several statistics 'agree': name one of watched.agree, other.agree"):
        watched(first + second, "agree")
