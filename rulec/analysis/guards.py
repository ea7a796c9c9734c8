"""Divisions that are guarded, `x/where(n > 0, n, 1)` with `n = norm(x)`: where the guard acts, `x` is 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rulec.analysis.fact import Line
from rulec.analysis.flow import Flow
from rulec.language.node import Kind, Node, Op, const, node, rewrite, walk

_SIZES = (Op.NORM, Op.RMS, Op.ABS)


def zero_unless(value: Node) -> tuple[Node, ...]:
    """What is 0 in the second arm of a `where`, by its condition `n > 0` or `n != 0` for a norm or a size `n`.

    Nothing where that arm reduces it: a norm of one tensor says nothing about the others.
    """
    condition, _, otherwise = value.args
    if condition.op not in (Op.GT, Op.NE) or condition.args[1] is not const(0) or condition.args[0].op not in _SIZES:
        return ()
    size = condition.args[0]
    wide = [n for n in walk([otherwise], {size}) if n.op.kind in (Kind.REDUCE, Kind.MATRIX)]
    return () if any(size.args[0] in walk([n]) for n in wide) else (size, size.args[0])


def with_guards_outside(flow: Flow) -> Flow:
    """The same flow, where a product with a guarded value, or a quotient of one, is a guarded product or quotient."""
    done: dict[Node, Node] = {}
    made = rewrite(flow.new.values(), _outside, done)
    lines: dict[Node, Sequence[Line]] = {done[old]: found for old, found in flow.lines.items() if old in done}
    return replace(flow, new=dict(zip(flow.new, made, strict=True)), lines={**lines, **flow.lines})


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
