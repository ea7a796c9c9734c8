"""What can be seen of a rule at once: whether it draws random numbers, and whether it treats a tensor by its axes."""

from __future__ import annotations

import functools

from rulec.language.node import Kind, Op, walk
from rulec.language.rule import Rule

#: The levels that follow from which axes are rows and columns.
_OF_MATRICES = ("row", "col", "matrix")


@functools.lru_cache(maxsize=256)
def draws(rule: Rule) -> bool:
    """Whether a rule draws random numbers, which follow from a tensor's number among all."""
    return any(n.op.kind is Kind.RANDOM for n in walk(rule.expressions))


@functools.lru_cache(maxsize=256)
def sees_shape(rule: Rule) -> bool:
    """Whether a rule treats a tensor by its dimensions, rows or columns, or its elements by their order."""
    if any(state.per in _OF_MATRICES or state.shape is not None for state in rule.state.values()):
        return True
    parts = [*walk(rule.expressions)]
    if {"ndim", "rows", "cols"} & {str(n.arg) for n in parts if n.op in (Op.NAME, Op.FACT)}:
        return True
    if any(n.op.kind in (Kind.MATRIX, Kind.RANDOM) for n in parts):
        return True
    return any(n.op.kind is Kind.REDUCE and n.arg in _OF_MATRICES for n in parts)
