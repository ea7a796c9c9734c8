"""The rules and keywords of an optimizer whose framework gives it gradients, parameters and one learning rate alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rulec.compiler.routing import Router
from rulec.errors import HyperError
from rulec.language.evaluations import check_single
from rulec.language.expr.node import Node
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean
from rulec.runtime.buckets.launch_builder import inputs_of


def check_rule(rule: Rule, framework: str) -> None:
    """HyperError for a rule that needs inputs or wraps another; RuleError for several gradients in a step."""
    inputs = () if rule.wraps else sorted({name for routed in Router(rule).rules for name in inputs_of(routed)})
    if rule.wraps or inputs:
        what = f"the input {inputs[0]}" if inputs else "a rule to wrap"
        raise HyperError(
            f"{rule.name} needs {what}, which an optimizer of {framework} does not give: compose a rule first"
        )
    check_single(rule, f"an optimizer of {framework}")


def check_keywords(rule: Rule, hyper: Mapping[str, Any], others: Iterable[str] = ()) -> None:
    """HyperError for a keyword that the rule does not have, and for a value outside its range.

    The optimizer takes `learning_rate` and the `others` as well, which are none of the rule's.
    """
    for name, value in hyper.items():
        if name not in rule.settings or name == "lr":
            known = ["learning_rate", *others, *(n for n in rule.settings if n != "lr")]
            raise HyperError(f"{rule.name} has no keyword {name!r}{did_you_mean(name, known)}")
        rule.settings[name].check(name, value, rule.name)


def first_rate(rule: Rule, rate: Any, kinds: str) -> Any:
    """The learning rate that users chose, or the rule's own; None where they chose none and the rule has none.

    HyperError for a number outside the rule's range, and where there is none at all: `kinds` are those to give.
    """
    setting = rule.settings.get("lr")
    if setting is None or callable(rate):
        return rate
    rate = setting.default if rate is None else rate
    if rate is None or isinstance(rate, Node):
        raise HyperError(f"{rule.name} needs a learning_rate: give {kinds}")
    setting.check("learning_rate", rate, rule.name)
    return rate
