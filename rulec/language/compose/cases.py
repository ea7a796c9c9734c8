"""Rules that apply to some tensors only, in compositions: one composition for each kind of tensor.

A rule with `otherwise` is a list of cases: a condition on tensors and a rule for them, and at the end the rule for all
that are left. Composed rules have a case for each choice of a case from every part, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from typing import Generic

from rulec.errors import RuleError
from rulec.language.expr.node import Node, Op, node, walk
from rulec.language.inputs import InputKind, kind_text
from rulec.language.rule_data import AnyRule, Routing, RuleData

#: The shape facts that depend on the view of a tensor as matrices.
_OF_VIEW = {"rows", "cols"}


@dataclass(frozen=True)
class Case(Generic[AnyRule]):
    """A rule without routing of its own, and the condition on its tensors; None for all that are left.

    If a wrapper leaves tensors to a rule it wraps, `rule` has no lines, and `wraps` is the name of this rule.
    """

    condition: Node | None
    rule: AnyRule
    is_rest: bool


def cases_of(rule: AnyRule) -> list[Case[AnyRule]]:
    """The cases of a rule, in the order in which they are tried."""
    cases: list[Case[AnyRule]] = []
    current: AnyRule | None = rule
    while current is not None:
        plain = replace(current, applies_to=None, otherwise=None)
        cases.append(Case(current.applies_to, plain, is_rest=current is not rule))
        if current.otherwise is not None and current.otherwise.rule is None:
            cases.append(Case(None, replace(plain, step=(), wraps=(current.otherwise.text,)), is_rest=True))
        current = current.rest
    return cases


def composed(
    rules: Sequence[AnyRule], join: Callable[[Sequence[AnyRule]], AnyRule], title: str | None = None
) -> AnyRule:
    """`join` of the rules; where some apply to some tensors only, of each choice of their cases.

    `title` is the name of the rule for the first of them. Raises RuleError where `join` does.
    """
    _check_views(rules)
    routes: list[tuple[Node | None, AnyRule]] = []
    taken: list[set[Node]] = []
    for choice in product(*map(cases_of, rules)):
        conditions = {case.condition: None for case in choice if case.condition is not None}
        if any(earlier <= conditions.keys() for earlier in taken):
            continue
        taken.append({*conditions})
        joined = _joined(rules, choice, join)
        routes.append((_all_of(conditions), joined if routes or title is None else joined.renamed(title)))
    return _nested(routes)


def _check_views(rules: Sequence[RuleData]) -> None:
    """RuleError where two rules choose tensors by rows and columns, and see other rows and columns."""
    choosing = [rule for rule in rules if rule.applies_to is not None and _OF_VIEW & {*_facts([rule.applies_to])}]
    for rule in choosing[1:]:
        if rule.view != choosing[0].view:
            raise RuleError(
                f"{choosing[0].name} and {rule.name} both choose tensors by rows and cols, and see them by different "
                f"views: they cannot be composed"
            )


def _facts(values: Sequence[Node]) -> Iterable[str]:
    return (str(n.arg) for n in walk(values) if n.op in (Op.FACT, Op.NAME))


def _joined(
    rules: Sequence[AnyRule], choice: Sequence[Case[AnyRule]], join: Callable[[Sequence[AnyRule]], AnyRule]
) -> AnyRule:
    left = [rule.name for rule, case in zip(rules, choice, strict=True) if case.is_rest]
    if not left:
        return join([case.rule for case in choice])
    try:
        return join(_with_rate(rules, choice))
    except RuleError as error:
        raise RuleError(f"for the tensors that {' and '.join(left)} leaves out: {error.message}") from None


def _with_rate(rules: Sequence[AnyRule], choice: Sequence[Case[AnyRule]]) -> list[AnyRule]:
    """The rules of a choice, with the learning rate that one of them has for the tensors its main rule leaves out."""
    rates = {
        case.rule.rate for rule, case in zip(rules, choice, strict=True)
        if case.is_rest and case.rule.rate is not rule.rate
    }  # fmt: skip
    parts = [case.rule for case in choice]
    if len(rates) != 1:
        return parts
    rate = rates.pop()
    return [replace(part, rate=rate) if part.multiplies_lr else part for part in parts]


def with_rate_of_rest(rule: AnyRule, called: Sequence[AnyRule], cases: Sequence[AnyRule]) -> AnyRule:
    """The rule of these cases, in which a case may replace the learning rate of its main rule."""
    rates = {case.rate for main, case in zip(called, cases, strict=True) if case.rate is not main.rate}
    return replace(rule, rate=rates.pop()) if len(rates) == 1 and rule.multiplies_lr else rule


def check_routed_call(title: str, called: AnyRule, applies_to: object) -> AnyRule:
    """The same called rule; RuleError where a rule for some tensors only calls another of this kind."""
    if applies_to is not None:
        raise RuleError(
            f"{title} says applies_to and calls {called.name}, which applies to some tensors only: leave applies_to out"
        )
    return called


def _all_of(conditions: Iterable[Node]) -> Node | None:
    terms = [*conditions]
    return reduce(lambda a, b: node(Op.AND, a, b), terms) if terms else None


def _nested(routes: Sequence[tuple[Node | None, AnyRule]]) -> AnyRule:
    """One rule of all cases, each the `otherwise` of the case before it."""
    rest: AnyRule | None = None
    for condition, rule in reversed(routes):
        routing = None if rest is None else Routing(rest)
        rest = with_inputs_of_rest(replace(rule, applies_to=condition, otherwise=routing))
    assert rest is not None  # every rule has a case
    return rest


def unify_inputs(rules: Sequence[RuleData]) -> dict[str, InputKind]:
    """The inputs of several rules as one set. Same-named ones are one, and must be of one kind."""
    merged: dict[str, InputKind] = {}
    for rule in rules:
        for key, kind in rule.inputs.items():
            if merged.setdefault(key, kind) != kind:
                said, other = kind_text(kind), kind_text(merged[key])
                raise RuleError(f"the input {key!r} is {said} for {rule.name} and {other} for another")
    return merged


def with_inputs_of_rest(rule: AnyRule) -> AnyRule:
    """The rule with the inputs of its `otherwise` too: the caller of a step passes the inputs of both at once."""
    rest = None if rule.otherwise is None else rule.otherwise.rule
    return rule if rest is None or not rest.inputs else replace(rule, inputs=unify_inputs([rule, rest]))
