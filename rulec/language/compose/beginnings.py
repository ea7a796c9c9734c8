"""First values of states that an elementwise expression cannot give: of matrices, reductions and random numbers.

Such a state begins at 0, and the step begins with a line that assigns it where `t` is 1. So every backend has them, and
a rule that counts another rule's updates, as `accumulate` does, begins it in its first.
"""

from __future__ import annotations

from dataclasses import replace

from rulec.language.compose.combine import count_draws, drawn_from
from rulec.language.expr.node import Kind, Node, Op, const, name, node, walk
from rulec.language.rule import Assign, Branch, Rule, Statement

_OF_LINES = (Kind.MATRIX, Kind.RANDOM, Kind.REDUCE)
_FIRST = node(Op.EQ, name("t"), const(1))


def with_beginnings(rule: Rule) -> Rule:
    """The rule with lines for these first values, under their states' conditions.

    Their draws are numbered after those of the step.
    """
    draws, states = count_draws(replace(rule, state={})), dict(rule.state)
    lines: dict[Node | None, list[Statement]] = {}
    for key, state in rule.state.items():
        if any(n.op.kind in _OF_LINES for n in walk([state.init])):
            value = drawn_from(state.init, draws)
            draws += sum(n.op.kind is Kind.RANDOM for n in walk([value]))
            lines.setdefault(state.condition, []).append(Assign(key, value, state.span))
            states[key] = replace(state, init=const(0))
    step: list[Statement] = []
    for condition, assigned in lines.items():
        first = Branch(_FIRST, tuple(assigned), (), assigned[0].span)
        step.append(first if condition is None else Branch(condition, (first,), (), first.span))
    return replace(rule, step=(*step, *rule.step), state=states) if step else rule
