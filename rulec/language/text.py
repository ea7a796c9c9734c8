"""Expressions and steps as text of the rule language: the way back from nodes to what an author writes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rulec.language.node import Kind, Node, Op, walk

_PRECEDENCE = {
    Op.WHERE: 10, Op.OR: 1, Op.AND: 2, Op.NOT: 3,
    Op.LT: 4, Op.LE: 4, Op.GT: 4, Op.GE: 4, Op.EQ: 4, Op.NE: 4,
    Op.ADD: 5, Op.SUB: 5, Op.MUL: 6, Op.DIV: 6, Op.MOD: 6, Op.FLOORDIV: 6, Op.MATMUL: 6, Op.NEG: 7, Op.POW: 8,
}  # fmt: skip
_ATOM = 10


def number_text(value: float) -> str:
    """The shortest text that reads back to the same float64."""
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == int(value) and abs(value) < 1e15 and not (value == 0 and math.copysign(1, value) < 0):
        return str(int(value))
    return repr(value)


def expression_text(value: Node, named: Mapping[Node, str] | None = None) -> str:
    """`value` in the rule language; nodes in `named` are written by name.

    Reading the text back gives the same node, but for nodes of the compiler's own (`Op.LOAD` and its kind),
    which are written by their names.
    """
    return _text(value, named or {}, top=True)[0]


def _text(value: Node, named: Mapping[Node, str], top: bool = False) -> tuple[str, int]:
    if not top and value in named:
        return named[value], _ATOM
    if value.op is Op.CONST:
        text = number_text(float(value.arg))  # type: ignore[arg-type]
        return text, 7 if text.startswith("-") else _ATOM
    if value.op is Op.STEP:
        return "t", _ATOM
    if value.op.kind is Kind.LEAF:
        return str(value.arg), _ATOM
    if value.op not in _PRECEDENCE or value.op is Op.WHERE:
        return f"{value.op.symbol}({_call_arguments(value, named)})", _ATOM
    return _operator_text(value, named)


def _operator_text(value: Node, named: Mapping[Node, str]) -> tuple[str, int]:
    level = _PRECEDENCE[value.op]
    if len(value.args) == 1:
        inner, inner_level = _text(value.args[0], named)
        sign = "not " if value.op is Op.NOT else "-"
        # A minus before a number would read back as one constant, not as a negation.
        bare = inner_level >= level and value.args[0].op is not Op.CONST
        return sign + (inner if bare else f"({inner})"), level
    (left, left_level), (right, right_level) = (_text(a, named) for a in value.args)
    comparison = value.op.kind is Kind.COMPARE
    if left_level < level or (left_level == level and (value.op is Op.POW or comparison)):
        left = f"({left})"
    if right_level < level or (right_level == level and value.op is not Op.POW):
        right = f"({right})"
    tight = value.op in (Op.MUL, Op.DIV, Op.POW, Op.MOD, Op.FLOORDIV)
    symbol = value.op.symbol if tight else f" {value.op.symbol} "
    return f"{left}{symbol}{right}", level


def _call_arguments(value: Node, named: Mapping[Node, str]) -> str:
    parts = [_text(a, named)[0] for a in value.args]
    if value.op.kind is Kind.REDUCE:
        return f'{parts[0]}, per="{value.arg}"'
    if value.op.kind is Kind.RANDOM:
        at, *extents = parts
        if isinstance(value.arg, tuple):
            extents = [_text(e, named)[0] for e in value.arg[1:]]
        return f"[{', '.join(extents)}], at={at}"
    if value.op is Op.NEWTON_SCHULZ:
        return f'{parts[0]}, steps={parts[1]}, dtype="{value.arg}"'
    return ", ".join(parts)


def shared(roots: Sequence[Node]) -> list[Node]:
    """The nodes under `roots` that are used more than once and are worth a name, operands first."""
    uses: dict[Node, int] = {}
    order = list(walk(roots))
    for value in order:
        for arg in value.args:
            uses[arg] = uses.get(arg, 0) + 1
    for root in roots:
        uses[root] = uses.get(root, 0) + 1
    return [value for value in order if uses.get(value, 0) > 1 and value.op.kind is not Kind.LEAF]
