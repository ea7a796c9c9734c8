"""Guarded divisions, `x/where(n > 0, n, 1)` with `n = norm(x)`: where the guard acts, `x` is 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rulec.analysis.fact import Line
from rulec.analysis.flow import Flow
from rulec.language.expr.node import Kind, Node, Op, const, node, rewrite, walk

_SIZES = (Op.NORM, Op.RMS, Op.ABS)


def zero_unless(value: Node) -> tuple[Node, ...]:
    """The values that are 0 in the second arm of a `where`, by its condition `n > 0` or `n != 0` for a size `n`.

    A size is a norm, a root mean square or an absolute value. Empty where the arm reduces its operand: a norm of one
    tensor says nothing about the others.
    """
    condition, _, otherwise = value.args
    if condition.op not in (Op.GT, Op.NE) or condition.args[1] is not const(0) or condition.args[0].op not in _SIZES:
        return ()
    size = condition.args[0]
    wide = [n for n in walk([otherwise], {size}) if n.op.kind in (Kind.REDUCE, Kind.MATRIX)]
    return () if any(size.args[0] in walk([n]) for n in wide) else (size, size.args[0])


def with_guards_outside(flow: Flow) -> Flow:
    """The same flow with guards moved outward: a product or quotient of a guarded value becomes a guarded one."""
    done: dict[Node, Node] = {}
    values = rewrite(flow.new.values(), _outside, done)
    lines: dict[Node, Sequence[Line]] = {done[old]: places for old, places in flow.lines.items() if old in done}
    return replace(flow, new=dict(zip(flow.new, values, strict=True)), lines={**lines, **flow.lines})


def _outside(value: Node) -> Node:
    if value.op not in (Op.MUL, Op.DIV):
        return value
    for index, operand in enumerate(value.args):
        if operand.op is Op.WHERE and zero_unless(operand):
            arms = [
                node(value.op, *(arm if i == index else x for i, x in enumerate(value.args)))
                for arm in operand.args[1:]
            ]
            return node(Op.WHERE, operand.args[0], *arms)
    return value
