"""A rule with some lines changed, for another library with its own form of these lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rulec.errors import RuleError
from rulec.language.check import check_rule
from rulec.language.compose.combine import map_nodes, substitute_hyper
from rulec.language.expr.names import BASE_NAMES
from rulec.language.expr.node import Node, Op, const, names_in, rewrite
from rulec.language.hyper import Hyper
from rulec.language.parse.expression import parse_expression
from rulec.language.parse.located import Text
from rulec.language.rule import Assign, Rule, Statement, assignments
from rulec.language.source import Source


def variant(rule: Rule, lines: Mapping[str, str], start: Mapping[str, object], more: Mapping[str, float]) -> Rule:
    """The rule with new lines and new initial values of states.

    `lines` maps a target to its new expression, `start` a state to its new initial value. A line for `p` replaces the
    line for `direction` in a rule with one. `more` has defaults of further hyper-parameters; the rule gets those in
    the new expressions. Raises RuleError for a target without a line.
    """
    assigned = [line.target for line in assignments(rule.step)]
    known = {*BASE_NAMES, *rule.hyper, *rule.state, *rule.inputs, *assigned, *more}
    values = {target: _parsed(text, known) for target, text in lines.items()}
    starts = {name: _parsed(str(text), known) for name, text in start.items()}
    for name in values.keys() - {*assigned, "p"}:
        raise RuleError(f"{rule.name} has no line that assigns {name}")
    read = names_in([*values.values(), *starts.values()])
    hyper = {**rule.hyper, **{k: Hyper(v) for k, v in more.items() if k in read and k not in rule.hyper}}
    state = {k: replace(s, init=starts[k]) if k in starts else s for k, s in rule.state.items()}
    moves = "p" if "p" in values and "p" not in assigned else ""
    step = tuple(_changed(line, values, moves) for line in rule.step)
    return check_rule(replace(rule, step=step, hyper=hyper, state=state, interop={}, path=None, function=None))


def _parsed(text: str, known: Iterable[str]) -> Node:
    return parse_expression(Text(text, Source("an interop section", text)), known)


def _changed(line: Statement, values: Mapping[str, Node], moves: str) -> Statement:
    if not isinstance(line, Assign):
        return line
    target = "p" if moves and line.target == "direction" else line.target
    return Assign(target, values[target], line.span) if target in values else line


def without(changed: Rule, zeros: Iterable[str], rule: Rule) -> Rule:
    """`rule` where `changed`, with the hyper-parameters `zeros` at 0, computes the same; otherwise `changed`."""
    values = {name: const(0.0) for name in zeros if name in changed.hyper and name not in rule.hyper}
    bare = substitute_hyper(changed, values)
    known = {"t", *bare.hyper}
    step = map_nodes(bare.step, lambda value: rewrite([value], lambda part: _added_nothing(part, known))[0])
    return rule if values.keys() | rule.hyper.keys() == changed.hyper.keys() and _same(step, bare, rule) else changed


def _same(step: tuple[Statement, ...], bare: Rule, rule: Rule) -> bool:
    return step == rule.step and bare.state == rule.state


def _added_nothing(value: Node, scalars: set[str]) -> Node:
    """`x` for `x + 0`, and 0 for `0*a` where `a` is an expression of `scalars` alone: these are finite."""
    zero = const(0.0)
    if value.op is Op.MUL and value.args[0] is zero and scalars >= {*names_in([value.args[1]])}:
        return zero
    return value.args[0] if value.op is Op.ADD and value.args[1] is zero else value
