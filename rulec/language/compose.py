"""Composition: rules made of rules.

Everything here ends in `inline`: the lines of a rule with its input replaced and its names kept apart. The result
is an ordinary rule, so what is composed compiles to one program like anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import isinf
from typing import Any

from rulec.errors import HyperError, RuleError
from rulec.language.expression import CONSTANTS, Text, parse_expression
from rulec.language.functions import FUNCTIONS
from rulec.language.node import Node, Op, name, names_in, node, rewrite
from rulec.language.rule import Assign, Branch, Hyper, Rule, State, Statement, assignments
from rulec.language.source import Source, did_you_mean


def map_nodes(step: Sequence[Statement], change: Callable[[Node], Node]) -> tuple[Statement, ...]:
    """The statements with every expression passed through `change`."""
    done: list[Statement] = []
    for line in step:
        if isinstance(line, Assign):
            done.append(replace(line, value=change(line.value)))
        else:
            then, otherwise = map_nodes(line.then, change), map_nodes(line.otherwise, change)
            done.append(replace(line, condition=change(line.condition), then=then, otherwise=otherwise))
    return tuple(done)


def _map_targets(step: Sequence[Statement], rename: Mapping[str, str]) -> tuple[Statement, ...]:
    done: list[Statement] = []
    for line in step:
        if isinstance(line, Assign):
            done.append(replace(line, target=rename.get(line.target, line.target)))
        else:
            then, otherwise = _map_targets(line.then, rename), _map_targets(line.otherwise, rename)
            done.append(Branch(line.condition, then, otherwise, line.span))
    return tuple(done)


def replace_names(value: Node, values: Mapping[str, Node]) -> Node:
    """`value` with each name in `values` replaced, all at once."""
    return rewrite([value], lambda n: values.get(str(n.arg), n) if n.op is Op.NAME else n)[0]


def _rename_all(rule: Rule, rename: Mapping[str, str]) -> Rule:
    """The rule with states and locals renamed everywhere."""
    values = {old: name(new) for old, new in rename.items()}
    step = _map_targets(map_nodes(rule.step, lambda n: replace_names(n, values)), rename)
    state = {rename.get(k, k): v for k, v in rule.state.items()}
    return replace(rule, step=step, state=state, evaluate=rule.evaluate and replace_names(rule.evaluate, values))


def _own_names(rule: Rule) -> list[str]:
    return list(dict.fromkeys([*rule.state, *(a.target for a in assignments(rule.step) if a.target != "p")]))


def _prefixed(rule: Rule, prefix: str) -> Rule:
    return _rename_all(rule, {n: f"{prefix}.{n}" for n in _own_names(rule)})


def _require_direction(rule: Rule, role: str) -> None:
    if rule.assigns_parameter:
        raise RuleError(f"{rule.name} assigns p itself, so it cannot be {role}: use it alone or last in a chain")


def inline(rule: Rule, prefix: str, value: Node) -> list[Statement]:
    """The lines of `rule` for the input `value`, its states and locals named `prefix.…`; ends in `prefix.direction`."""
    _require_direction(rule, "called")
    return _with_input(_prefixed(rule, prefix), prefix, value)


def _with_input(rule: Rule, prefix: str, value: Node) -> list[Statement]:
    lines: list[Statement] = []
    if value.args:
        lines.append(Assign(f"{prefix}.g", value))
        value = name(f"{prefix}.g")
    return [*lines, *map_nodes(rule.step, lambda n: replace_names(n, {"g": value}))]


def called_states(rule: Rule, prefix: str) -> dict[str, State]:
    """The states of a rule called inside another, under the names its inlined lines use."""
    return {f"{prefix}.{key}": state for key, state in rule.state.items()}


def unify_hyper(owners: Sequence[tuple[str, Mapping[str, Hyper]]]) -> dict[str, Hyper]:
    """One set of hyper-parameters: same-named ones are the same, and their defaults must agree."""
    merged: dict[str, Hyper] = {}
    first: dict[str, str] = {}
    for owner, hyper in owners:
        for key, mine in hyper.items():
            other = merged.get(key)
            if other is None:
                merged[key], first[key] = mine, owner
            elif None in (mine.default, other.default) or mine.default == other.default:
                merged[key] = _tighter(other, mine)
            else:
                raise RuleError(
                    f"{first[key]} and {owner} both have a hyper-parameter {key!r}, with defaults {other.default} and "
                    f"{mine.default}: bind one of them to a number or to another name, as {owner}.bind({key}=...)"
                )
    return merged


def _tighter(a: Hyper, b: Hyper) -> Hyper:
    return Hyper(
        default=b.default if a.default is None else a.default,
        min=max(a.min, b.min), max=min(a.max, b.max), above=max(a.above, b.above), below=min(a.below, b.below),
        static=a.static or b.static, span=a.span or b.span,
    )  # fmt: skip


def _keys(rules: Sequence[Rule]) -> list[str]:
    keys: list[str] = []
    for rule in rules:
        key, count = rule.key, 2
        while key in keys:
            key, count = f"{rule.key}{count}", count + 1
        keys.append(key)
    return keys


def plus(rules: Sequence[Rule], rule_name: str | None = None) -> Rule:
    """The rules side by side: all see the same gradient and their directions add."""
    for rule in rules:
        _require_direction(rule, "added")
    keys = _keys(rules)
    total = name(f"{keys[0]}.direction")
    for key in keys[1:]:
        total = node(Op.ADD, total, name(f"{key}.direction"))
    inputs = [name("g")] * len(rules)
    return _join(rules, keys, inputs, [Assign("direction", total)], rule_name or "Plus".join(r.name for r in rules))


def chain(rules: Sequence[Rule], rule_name: str | None = None) -> Rule:
    """The rules one after the other: each one's input `g` is the direction of the one before it."""
    for rule in rules[:-1]:
        _require_direction(rule, "followed by another")
    for before, rule in pairwise(rules):
        if not rule.reads("g"):
            a, b = before.key, rule.key
            raise RuleError(
                f"{rule.name} never reads its input g, so {before.name} before it would have no effect: "
                f"did you mean {a} + {b}?"
            )
    keys = _keys(rules)
    inputs = [name("g"), *(name(f"{key}.direction") for key in keys[:-1])]
    last: list[Statement] = []
    if not rules[-1].assigns_parameter:
        last = [Assign("direction", name(f"{keys[-1]}.direction"))]
    return _join(rules, keys, inputs, last, rule_name or "Then".join(r.name for r in rules))


def _join(
    rules: Sequence[Rule], keys: Sequence[str], inputs: Sequence[Node], last: Sequence[Statement], rule_name: str
) -> Rule:
    """One rule of the prefixed lines of several and `last`, with every name shortened that clashes with none."""
    parts = [_prefixed(rule, key) for rule, key in zip(rules, keys, strict=True)]
    step: list[Statement] = []
    for part, key, value in zip(parts, keys, inputs, strict=True):
        step.extend(_with_input(part, key, value))
    hyper = unify_hyper([(rule.name, rule.hyper) for rule in rules])
    joined = Rule(
        name=rule_name,
        step=(*step, *last),
        hyper=hyper,
        state={key: state for part in parts for key, state in part.state.items()},
        inputs={key: kind for rule in rules for key, kind in rule.inputs.items()},
        **_single_attributes(parts),
    )
    return _rename_all(joined, _short_names(rules, keys, {*hyper, *joined.inputs}))


def _short_names(rules: Sequence[Rule], keys: Sequence[str], taken: set[str]) -> dict[str, str]:
    owners: dict[str, list[str]] = {}
    for rule, key in zip(rules, keys, strict=True):
        for own in _own_names(rule):
            owners.setdefault(own, []).append(f"{key}.{own}")
    return {
        full[0]: own for own, full in owners.items() if len(full) == 1 and own not in taken and own != "direction"
    }  # fmt: skip


def _single_attributes(rules: Sequence[Rule]) -> dict[str, Any]:
    """What at most one of several composed rules may have: an evaluation point, a skip, a routing, a view."""
    found: dict[str, Any] = {}
    for attribute in ("evaluate", "skip", "applies_to", "otherwise", "view"):
        having = [rule for rule in rules if getattr(rule, attribute)]
        if len(having) > 1:
            raise RuleError(f"{having[0].name} and {having[1].name} both say {attribute}: only one of them may")
        if having:
            found[attribute] = getattr(having[0], attribute)
    return found


class _AnyName:
    """Every identifier but the language's own: what a bound expression may name before the rules are joined."""

    def __contains__(self, identifier: object) -> bool:
        return identifier not in CONSTANTS and identifier not in FUNCTIONS

    def __iter__(self) -> Iterator[str]:
        return iter(())


def bind(rule: Rule, bindings: Mapping[str, float | str]) -> Rule:
    """The rule with some hyper-parameters bound.

    A number sets the default. An expression (text) of hyper-parameters takes the hyper-parameter's place; a single
    new name renames it. Names the rule does not have are left for another rule to supply, such as `2*lr`.
    """
    hyper = dict(rule.hyper)
    values: dict[str, Node] = {}
    for key, bound in bindings.items():
        if key not in rule.hyper:
            raise RuleError(f"{rule.name} has no hyper-parameter {key!r}{did_you_mean(key, rule.hyper)}")
        if not isinstance(bound, str):
            hyper[key] = replace(rule.hyper[key], default=_checked_default(rule, key, bound))
            continue
        value = parse_expression(Text(bound, Source(f"<binding of {key}>", bound)), _AnyName())
        if value.op is Op.CONST:
            hyper[key] = replace(rule.hyper[key], default=_checked_default(rule, key, float(value.arg)))  # type: ignore[arg-type]
            continue
        values[key] = value
    for key, value in values.items():
        old = hyper.pop(key)
        if value.op is Op.NAME and value.arg not in rule.hyper:
            hyper[str(value.arg)] = old
        for needed in names_in([value]):
            hyper.setdefault(needed, Hyper(None))
    return _substitute_hyper(replace(rule, hyper=hyper), values)


def _checked_default(rule: Rule, key: str, value: float) -> float:
    try:
        return rule.hyper[key].check(key, float(value), rule.name)
    except HyperError as error:
        raise RuleError(str(error)) from None


def _substitute_hyper(rule: Rule, values: Mapping[str, Node]) -> Rule:
    def change(n: Node) -> Node:
        return replace_names(n, values)

    hyper = dict(rule.hyper)
    for key, h in rule.hyper.items():
        if isinstance(h.default, Node):
            hyper[key] = replace(h, default=change(h.default))
    state = {
        key: replace(
            state,
            init=change(state.init),
            shape=None if state.shape is None else tuple(map(change, state.shape)),
            condition=state.condition and change(state.condition),
        )
        for key, state in rule.state.items()
    }
    optional = {k: change(v) for k in ("evaluate", "skip", "applies_to") if (v := getattr(rule, k)) is not None}
    return replace(rule, hyper=hyper, state=state, step=map_nodes(rule.step, change), **optional)  # type: ignore[arg-type]


def unbounded(hyper: Hyper) -> bool:
    """Whether any number is in the hyper-parameter's range."""
    return all(map(isinf, (hyper.min, hyper.max, hyper.above, hyper.below)))
