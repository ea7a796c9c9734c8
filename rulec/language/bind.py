"""Binding hyper-parameters: to a number, to another name, to an expression of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from rulec.errors import HyperError, RuleError
from rulec.language.check import check_elementwise
from rulec.language.compose import plus, replace_names, substitute_hyper, with_own_rate
from rulec.language.expression import parse_expression
from rulec.language.functions import FUNCTIONS
from rulec.language.hyper import DEFAULT_LR, Hyper, well_known_range
from rulec.language.located import Text
from rulec.language.names import RESERVED, RESULTS, declared_problem, short
from rulec.language.node import Node, Op, names_in
from rulec.language.rule import Routing, Rule
from rulec.language.source import Source, did_you_mean
from rulec.language.traits import all_hyper

#: The value of a binding: a number or an expression. A Text is an expression with its place in a file.
Binding = float | str | Text


class _FreeNames:
    """The names in a bound expression: hyper-parameters of this rule, or of rules to be composed with it later."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def __contains__(self, identifier: object) -> bool:
        return str(identifier) in self.rule.hyper or not (identifier in FUNCTIONS or self.problem(str(identifier)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.rule.hyper)

    def problem(self, identifier: str) -> str:
        """Why a bound expression may not contain this name, as a sentence; empty where it may."""
        meaning = RESERVED.get(identifier) or RESULTS.get(identifier)
        if identifier in self.rule.state or identifier in self.rule.inputs:
            meaning = f"{'a state' if identifier in self.rule.state else 'an input'} of {self.rule.name}"
        if meaning:
            return f"{identifier!r} is {meaning}: bind to numbers and hyper-parameters only"
        return declared_problem(identifier)


def bind(rule: Rule, bindings: Mapping[str, Binding]) -> Rule:
    """The rule with some hyper-parameters bound.

    A number sets the default. An expression (text) of hyper-parameters takes the hyper-parameter's place; a single
    new name renames it. Names unknown to the rule, such as `lr` in `2*lr`, are for another rule to supply.
    """
    if "lr" in bindings and "lr" not in rule.hyper and not rule.assigns_parameter and not rule.wraps:
        rule = replace(rule, hyper={"lr": Hyper(DEFAULT_LR, **well_known_range("lr")), **rule.hyper})
    rule, bindings = _routed(rule, bindings)
    hyper = dict(rule.hyper)
    values: dict[str, Node] = {}
    for key, bound in bindings.items():
        if key not in rule.hyper:
            raise RuleError(f"{rule.name} has no hyper-parameter {short(key)}{did_you_mean(key, rule.all_hyper)}")
        value = _expression(rule, key, bound) if isinstance(bound, str | Text) else bound
        if isinstance(value, Node) and value.op is not Op.CONST:
            values[key] = value
        else:
            number = value.arg if isinstance(value, Node) else value
            hyper[key] = replace(hyper[key], default=_checked(rule, key, number))
    return _substituted(replace(rule, hyper=hyper), values) if values else replace(rule, hyper=hyper)


def _routed(rule: Rule, bindings: Mapping[str, Binding]) -> tuple[Rule, dict[str, Binding]]:
    """The rule with `otherwise` bound already, and the bindings that remain for the rule itself.

    A hyper-parameter of both is one hyper-parameter, so it is bound in both; its default is the main rule's.
    """
    rest = None if rule.otherwise is None else rule.otherwise.rule
    known = {} if rest is None else rest.hyper_with_rate | all_hyper(rest)
    rest_bindings = {
        key: bound for key, bound in bindings.items()
        if key in known and (key not in rule.hyper or isinstance(bound, str | Text))
    }  # fmt: skip
    if rest is None or not rest_bindings:
        return rule, dict(bindings)
    main_bindings = {key: bound for key, bound in bindings.items() if key in rule.hyper or key not in known}
    return replace(rule, otherwise=Routing(bind(rest, rest_bindings))), main_bindings


def _expression(rule: Rule, key: str, bound: str | Text) -> Node:
    text = bound if isinstance(bound, Text) else Text(bound, Source(f"<binding of {key}>", bound))
    names = _FreeNames(rule)
    return check_elementwise(parse_expression(text, names, explain=names.problem), "a binding", text.start)


def _checked(rule: Rule, key: str, value: Any) -> float:
    if value is None or isinstance(value, Mapping | list | tuple):
        raise RuleError(f"{key} of {rule.name} is bound to a number or an expression, not to {value!r}")
    try:
        return rule.hyper[key].check(key, value, rule.name)
    except HyperError as error:
        raise RuleError(str(error)) from None


def _substituted(rule: Rule, values: Mapping[str, Node]) -> Rule:
    """The rule with expressions in place of hyper-parameters, and with the hyper-parameters in these expressions."""
    if "lr" in values:
        rule = with_own_rate(rule)
    hyper = {key: h for key, h in rule.hyper.items() if key not in values}
    for key, value in values.items():
        if value.op is Op.NAME:
            hyper.setdefault(cast(str, value.arg), rule.hyper[key])
    for needed in names_in(values.values()):
        hyper.setdefault(needed, rule.hyper.get(needed, Hyper(None, **well_known_range(needed))))
    for key, h in hyper.items():
        if isinstance(h.default, Node):
            hyper[key] = replace(h, default=replace_names(h.default, values))
    # Other libraries' names for its hyper-parameters are true of the rule as it was.
    done = replace(substitute_hyper(rule, values), hyper=hyper, interop={})
    if "lr" not in names_in(values.values()) or done.assigns_parameter or done.wraps:
        return done
    # Lines with a bound lr belong behind a prefix, as a composed rule's do: see check_direction_free_of_lr.
    joined = plus([done])
    return replace(done, step=joined.step, state=joined.state, evaluate=joined.evaluate, skip=joined.skip)
