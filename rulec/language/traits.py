"""Traits of a rule, read off its text: random numbers, and dependence on a tensor's axes."""

from __future__ import annotations

import functools

from rulec.language.node import Kind, Op, walk
from rulec.language.rule import Rule

#: The levels that depend on the choice of rows and columns among the axes.
_OF_MATRICES = ("row", "col", "matrix")


@functools.lru_cache(maxsize=256)
def draws(rule: Rule) -> bool:
    """Whether a rule draws random numbers. They depend on the tensor's number among all tensors."""
    return any(n.op.kind is Kind.RANDOM for n in walk(rule.expressions))


@functools.lru_cache(maxsize=256)
def sees_shape(rule: Rule) -> bool:
    """Whether a rule depends on a tensor's dimensions, rows or columns, or on the order of its elements."""
    if any(state.per in _OF_MATRICES or state.shape is not None for state in rule.state.values()):
        return True
    parts = [*walk(rule.expressions)]
    if {"ndim", "rows", "cols"} & {str(n.arg) for n in parts if n.op in (Op.NAME, Op.FACT)}:
        return True
    if any(n.op.kind in (Kind.MATRIX, Kind.RANDOM) for n in parts):
        return True
    return any(n.op.kind is Kind.REDUCE and n.arg in _OF_MATRICES for n in parts)
