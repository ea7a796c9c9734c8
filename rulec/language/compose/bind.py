"""Binding hyper-parameters: to a number, to another name, to an expression of others."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from rulec.errors import HyperError, RuleError
from rulec.language.check import check_elementwise
from rulec.language.compose.combine import free_name, map_nodes, own_names, plus, replace_names, substitute_hyper
from rulec.language.expr.functions import FUNCTIONS
from rulec.language.expr.names import CONSTANTS, RESERVED, RESULTS, declared_problem, short
from rulec.language.expr.node import FACTS, Node, Op, const, name, names_in, node, rewrite
from rulec.language.hyper import AT_START, DEFAULT_LR, Hyper, well_known_range
from rulec.language.parse.expression import parse_expression
from rulec.language.parse.located import Text
from rulec.language.rule_data import AnyRule, Assign, Routing, RuleData, Sizes, Statement
from rulec.language.sizes import entries, entry, sized
from rulec.language.source import Source, did_you_mean, rule_error

#: The value of a binding: a number or an expression, or a list of them. A Text is an expression with its place in a
#: file.
Binding = float | str | Text | list[Any]


class _FreeNames:
    """The names in a bound expression: hyper-parameters of this rule, or of rules to be composed with it later."""

    def __init__(self, rule: RuleData) -> None:
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


def bind(rule: AnyRule, bindings: Mapping[str, Binding]) -> AnyRule:
    """The rule with some hyper-parameters bound, and without the variants of these.

    A number sets the default. An expression (text) of hyper-parameters takes the hyper-parameter's place; a single
    new name renames it. Names unknown to the rule, such as `lr` in `2*lr`, are for another rule to supply.
    """
    if rule.variants:
        left = {key: values for key, values in rule.variants.items() if key not in bindings}
        return replace(bind(replace(rule, variants={}), bindings), variants=left)
    if "lr" in bindings and "lr" not in rule.hyper and rule.multiplies_lr:
        rule = replace(rule, hyper={"lr": Hyper(DEFAULT_LR, **well_known_range("lr")), **rule.hyper})
    if AT_START in bindings and AT_START not in rule.hyper and AT_START in rule.all_hyper:
        rule = replace(rule, hyper={**rule.hyper_with_rate, AT_START: rule.all_hyper[AT_START]})
    rule, bindings = _routed(rule, bindings)
    if rule.sizes is not None and not bindings.keys().isdisjoint({**rule.sizes.lists, **rule.sizes.counts}):
        return _bound_sizes(rule, rule.sizes, bindings)
    bound = _bound(rule, bindings)
    if bound.sizes is None or bound.sizes.make is None:
        return bound
    make = bound.sizes.make
    return replace(bound, sizes=replace(bound.sizes, make=lambda values: bind(make(values), bindings)))


def _bound_sizes(rule: AnyRule, sizes: Sizes, bindings: Mapping[str, Binding]) -> AnyRule:
    """The rule for the lengths of bound lists and counts, with each entry of a list bound."""
    lists = {key: _parts(rule, key, bound) for key, bound in bindings.items() if key in sizes.lists}
    counts = {key: _whole(rule, key, bound) for key, bound in bindings.items() if key in sizes.counts}
    others = {key: bound for key, bound in bindings.items() if key not in {*lists, *counts}}
    # Of a list the length alone is for now: its entries may be expressions, and are bound below.
    lengths = {key: [rule.hyper[entry(key, 0)].default] * len(parts) for key, parts in lists.items()}
    try:
        rule, _ = sized(rule, {**lengths, **counts})
    except HyperError as error:
        raise RuleError(str(error)) from None
    for key, parts in lists.items():
        others |= dict(zip(entries(key, len(parts)), parts, strict=True))
    return bind(rule, others) if others else rule


def _parts(rule: RuleData, key: str, bound: Binding) -> list[Any]:
    """The bindings of the entries of a list."""
    if isinstance(bound, list | tuple):
        return [*bound]
    text = bound if isinstance(bound, Text) else Text(str(bound), Source(f"<binding of {key}>", str(bound)))
    body = text.joined().parse()
    if len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.List | ast.Tuple):
        return [text.joined().part(part) for part in body[0].value.elts]
    raise rule_error(f"{key} of {rule.name} is a list: bind it to one, as {key}=[0, 0.9]", text.start)


def _whole(rule: RuleData, key: str, bound: Binding) -> int:
    """The number that a count is bound to."""
    value = _expression(rule, key, bound) if isinstance(bound, str | Text) else bound
    number = value.arg if isinstance(value, Node) and value.op is Op.CONST else value
    if isinstance(number, Node):
        raise RuleError(f"{key} of {rule.name} decides how many states or lines it has: bind it to a number")
    return int(_checked(replace(rule, hyper={key: replace(rule.hyper[key], decides=False)}), key, number))


def _bound(rule: AnyRule, bindings: Mapping[str, Binding]) -> AnyRule:
    """The rule with some hyper-parameters bound, of the same lengths."""
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
    if not values:
        return replace(rule, hyper=hyper)
    return _whole_lists(_substituted(replace(rule, hyper=hyper), values))


def _whole_lists(rule: AnyRule) -> AnyRule:
    """The rule without the lists of which an entry is no hyper-parameter any more."""
    if rule.sizes is None:
        return rule
    lists = {key: n for key, n in rule.sizes.lists.items() if rule.hyper.keys() >= {*entries(key, n)}}
    return replace(rule, sizes=replace(rule.sizes, lists=lists))


def _routed(rule: AnyRule, bindings: Mapping[str, Binding]) -> tuple[AnyRule, dict[str, Binding]]:
    """The rule with `otherwise` bound already, and the bindings that remain for the rule itself.

    A hyper-parameter of both is one hyper-parameter, so it is bound in both; its default is the main rule's.
    """
    rest = None if rule.otherwise is None else rule.otherwise.rule
    known = {} if rest is None else rest.hyper_with_rate | rest.all_hyper
    rest_bindings = {
        key: bound for key, bound in bindings.items()
        if key in known and (key not in rule.hyper or isinstance(bound, str | Text))
    }  # fmt: skip
    if rest is None or not rest_bindings:
        return rule, dict(bindings)
    main_bindings = {key: bound for key, bound in bindings.items() if key in rule.hyper or key not in known}
    return replace(rule, otherwise=Routing(bind(rest, rest_bindings))), main_bindings


def _expression(rule: RuleData, key: str, bound: str | Text) -> Node:
    text = bound if isinstance(bound, Text) else Text(bound, Source(f"<binding of {key}>", bound))
    names = _FreeNames(rule)
    return check_elementwise(parse_expression(text, names, explain=names.problem), "a binding", text.start)


def _checked(rule: RuleData, key: str, value: Any) -> float:
    if value is None or isinstance(value, Mapping | list | tuple):
        raise RuleError(f"{key} of {rule.name} is bound to a number or an expression, not to {value!r}")
    try:
        return rule.hyper[key].check(key, value, rule.name)
    except HyperError as error:
        raise RuleError(str(error)) from None


def _substituted(rule: AnyRule, values: Mapping[str, Node]) -> AnyRule:
    """The rule with expressions in place of hyper-parameters, and with the hyper-parameters in these expressions."""
    hyper = {key: h for key, h in rule.hyper.items() if key not in values}
    for key, value in values.items():
        if value.op is Op.NAME:
            second = key == "lr"
            hyper.setdefault(cast(str, value.arg), replace(rule.hyper[key], follows=second or rule.hyper[key].follows))
    for needed in names_in(values.values()):
        hyper.setdefault(needed, rule.hyper.get(needed, Hyper(None, **well_known_range(needed))))
    for key, h in hyper.items():
        if isinstance(h.default, Node):
            hyper[key] = replace(h, default=replace_names(h.default, values))
    # Other libraries' names for its hyper-parameters are true of the rule as it was.
    done = replace(substitute_hyper(rule, values), hyper=hyper, interop={})
    if "lr" not in names_in(values.values()) or not done.reads("lr") or done.assigns_parameter or done.wraps:
        return done
    # Lines with a bound lr belong behind a prefix, as a composed rule's do: see check_direction_free_of_lr.
    joined = plus([done])
    return replace(
        done, step=joined.step, state=joined.state, evaluate=joined.evaluate, skip=joined.skip, passes=joined.passes
    )


def without_term(rule: AnyRule, key: str) -> AnyRule:
    """The rule without a hyper-parameter: products with this hyper-parameter are 0.

    Raises RuleError where another hyper-parameter's default follows from it.
    """
    rest = rule.rest
    if rest is not None and key in rest.all_hyper:
        rule = replace(rule, otherwise=Routing(without_term(rest, key)))
    if key not in rule.hyper:
        return rule
    hyper = {kept: h for kept, h in rule.hyper.items() if kept != key}
    for kept, h in hyper.items():
        if isinstance(h.default, Node) and key in names_in([h.default]):
            raise RuleError(f"the default of {kept} of {rule.name} follows from {key}, which cannot be taken away")
    bare = substitute_hyper(rule, {key: const(0.0)})
    step = map_nodes(bare.step, lambda value: rewrite([value], _without_nothing)[0])
    return replace(bare, step=step, hyper=hyper, interop={})


def with_maximum(rule: AnyRule, key: str) -> AnyRule:
    """The rule with the largest value of a state so far, wherever its step reads the new value of the state.

    Raises RuleError where the step does not assign that state, or does so under a condition.
    """
    if not any(isinstance(line, Assign) and line.target == key for line in rule.step) or key not in rule.state:
        raise RuleError(f"{rule.name} has no state {key} that its step assigns under no condition")
    largest = free_name(f"{key}_max", {*own_names(rule), *rule.hyper, *rule.inputs, *FACTS, *CONSTANTS})
    step: list[Statement] = []
    for line in rule.step:
        assigned = any(isinstance(each, Assign) and each.target == key for each in step)
        step += map_nodes([line], lambda value: replace_names(value, {key: name(largest)})) if assigned else [line]
        if isinstance(line, Assign) and line.target == key:
            step.append(Assign(largest, node(Op.MAXIMUM, name(largest), name(key))))
    return replace(rule, step=tuple(step), state={**rule.state, largest: rule.state[key]}, interop={})


def _without_nothing(part: Node) -> Node:
    """0 for a product with 0, and the other term of a sum with 0."""
    if part.op not in (Op.MUL, Op.ADD, Op.SUB):
        return part
    zero = const(0.0)
    left, right = part.args
    if part.op is Op.MUL:
        return zero if zero in (left, right) else part
    if right is zero:
        return left
    return right if left is zero and part.op is Op.ADD else part
