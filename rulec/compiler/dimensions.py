"""Words of a rule for the dimensions of a tensor, in the numbers of its shape: `dim(i)`, `axis=i`, axes and blocks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from rulec.compiler.indices import index_of
from rulec.compiler.ir import COLS, ROWS
from rulec.compiler.view import placed_as
from rulec.language.expr.arithmetic import number_known
from rulec.language.expr.node import PLACED, Kind, Node, Op, const, extent, node
from rulec.language.expr.static import ALONG, is_lowered
from rulec.language.expr.text import expression_text
from rulec.language.rule_data import FLATTENED, RuleData, placed_level
from rulec.language.source import Span, rule_error


def of_shape(rule: RuleData, value: Node, known: Mapping[str, float], span: Span | None) -> Node:
    """What is of axes or blocks, as it is for this tensor; `dim(i)` and `index` of its shape."""
    if value.op is Op.INDEX:
        return index_of(rule, value, known, span)
    if value.op is Op.DIM:
        return _extent(rule, known, _dimension("dim({})", value.args[0], known, span))
    if value.op in ALONG and not is_lowered(value):
        *operands, number = value.args
        return node(value.op, *operands, *_along(rule, known, _dimension("axis={}", number, known, span)))
    if value.op.kind is Kind.REDUCE and value.arg in PLACED:
        return node(value.op, value.args[0], placed_as(rule, str(value.arg), value.args[1], known, span))
    return value


def _dimension(text: str, number: Node, known: Mapping[str, float], span: Span | None) -> int:
    """The dimension that a number in a call stands for; RuleError, with the call as `text`, where there is none."""
    place, said = number_known(number, known), text.format(expression_text(number))
    count = int(known["ndim"])
    if place is None:
        raise rule_error(f"{said} must be known when a kernel is made: make it of numbers and shape facts", span)
    if not float(place).is_integer() or not -count <= place < count:
        size = f"{count} dimension{'' if count == 1 else 's'}"
        raise rule_error(f"a tensor of {size} has no {said}: put it under a condition on ndim", span)
    return int(place) % count


def _extent(rule: RuleData, known: Mapping[str, float], dimension: int) -> Node:
    """The extent of a dimension: where it is all rows or all columns of the matrix, these."""
    count = int(known["ndim"])
    if rule.view == FLATTENED and not placed_level(rule):
        if dimension == 0 and count > 1:
            return ROWS
        if dimension == count - 1 < 2:
            return COLS
    return node(Op.FACT, extent(dimension))


def _along(rule: RuleData, known: Mapping[str, float], dimension: int) -> tuple[Node, Node, Node]:
    """The extent of a dimension, and the numbers of elements before it and after it."""
    sizes = [_extent(rule, known, k) for k in range(int(known["ndim"]))]
    return sizes[dimension], _product(sizes[:dimension]), _product(sizes[dimension + 1 :])


def _product(factors: Sequence[Node]) -> Node:
    """The product of some extents."""
    return functools.reduce(lambda a, b: node(Op.MUL, a, b), factors) if factors else const(1)
