"""Traits of a rule, read off its text: random numbers, dependence on a tensor's axes, and the rule for the rest."""

from __future__ import annotations

import functools

from rulec.language.expr.counts import level_text
from rulec.language.expr.node import FACTS, PLACED, Kind, Op, walk
from rulec.language.rule_data import RuleData, conditions

#: The levels that depend on the choice of rows and columns among the axes.
_OF_MATRICES = ("row", "col", "matrix")


@functools.lru_cache(maxsize=256)
def draws(rule: RuleData) -> bool:
    """Whether a rule draws random numbers. They depend on the tensor's number among all tensors."""
    return any(n.op.kind is Kind.RANDOM for n in walk(rule.expressions))


@functools.lru_cache(maxsize=256)
def reads_tags(rule: RuleData) -> bool:
    """Whether a rule asks for a tensor's tags, to know whether it applies."""
    condition = [] if rule.applies_to is None else [rule.applies_to]
    return any(n.op is Op.FACT and str(n.arg).startswith("tagged(") for n in walk(condition))


@functools.lru_cache(maxsize=256)
def sees_shape(rule: RuleData) -> bool:
    """Whether a rule depends on a tensor's dimensions, rows or columns, or on the order of its elements."""
    if placed_level(rule):
        return True
    if any(state.per in _OF_MATRICES or state.shape is not None for state in rule.state.values()):
        return True
    parts = [*walk(rule.expressions)]
    if {"ndim", "rows", "cols"} & {str(n.arg) for n in parts if n.op in (Op.NAME, Op.FACT)}:
        return True
    if any(n.op.kind in (Kind.MATRIX, Kind.RANDOM, Kind.SHAPE) for n in parts):
        return True
    return any(n.op.kind is Kind.REDUCE and n.arg in _OF_MATRICES for n in parts)


@functools.lru_cache(maxsize=256)
def placed_level(rule: RuleData) -> str:
    """A level `axis(i)` or `block(n)` of a rule, as it is written; empty for a rule without one."""
    for state in rule.state.values():
        if state.number is not None:
            return level_text(state.per, state.number)
    for part in walk(rule.expressions):
        if part.op.kind is Kind.REDUCE and part.arg in PLACED:
            return level_text(str(part.arg), part.args[1])
    return ""


@functools.lru_cache(maxsize=256)
def counts_dimensions(rule: RuleData) -> bool:
    """Whether a rule has a level `axis(i)` or `block(n)`, or reads `dim(i)`."""
    return bool(placed_level(rule)) or any(n.op is Op.DIM for n in walk(rule.expressions))


@functools.lru_cache(maxsize=256)
def differs_by_shape(rule: RuleData) -> bool:
    """Whether a rule has levels that mean something else for another rank, or conditions on the shape."""
    tests = [branch.condition for branch in conditions(rule.step)]
    tests += [state.condition for state in rule.state.values() if state.condition is not None]
    return counts_dimensions(rule) or any(str(n.arg) in FACTS for n in walk(tests) if n.op in (Op.NAME, Op.FACT))
