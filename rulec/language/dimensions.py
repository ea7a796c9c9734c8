"""Loops over the axes of a tensor, and a state for each axis.

A rule is written out for every number of dimensions that its `applies_to` allows. What a tensor of fewer dimensions
lacks stands under a condition on `ndim`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rulec.errors import RuleError
from rulec.language.expr.arithmetic import number_known
from rulec.language.expr.names import name_problem, short
from rulec.language.expr.node import Node, Op, const, name, node

#: Most dimensions of the tensors of a rule with a loop over its axes.
MOST = 8

#: Tools look at a rule for a matrix, also where it applies to tensors of more dimensions alone.
_MATRIX = 2

NDIM = name("ndim")

#: A number, and the condition of the tensors that have an axis of it; None for all tensors.
Pass = tuple[int, Node | None]


@dataclass(frozen=True)
class Dimensions:
    """The numbers of dimensions of the tensors that a rule may apply to, by its condition on tensors."""

    applies_to: Node | None = None
    counts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        every = range(MOST + 2)
        counts = [k for k in every if self.applies_to is None or _truth(self.applies_to, k) is not False]
        object.__setattr__(self, "counts", tuple(counts))

    def passes(self, start: int, end: Node, known: Mapping[str, float]) -> list[Pass]:
        """The numbers from `start` up to an expression of `ndim`, each with its condition.

        Raises RuleError where `applies_to` has no largest number of dimensions, and where `end` is made of more.
        `known` has values of other names.
        """
        if MOST + 1 in self.counts:
            raise RuleError(
                f"what is repeated for each axis needs a largest number of dimensions, at most {MOST}: say it under "
                f"applies_to, as in ndim <= 4"
            )
        ends = [number_known(end, {**known, "ndim": k}) for k in self.counts]
        if any(n is None or not float(n).is_integer() for n in ends):
            raise RuleError("a range over the axes of a tensor ends in ndim, or in ndim and whole numbers")
        last = max((int(n) for n in ends if n is not None), default=0)
        first = min((int(n) for n in ends if n is not None), default=0)
        always = min(first, number_known(end, {**known, "ndim": _MATRIX}) or 0)
        return [(i, None if i < always else node(Op.GT, end, const(i))) for i in range(start, last)]

    @property
    def axes(self) -> list[Pass]:
        """All axes; RuleError as that of `passes`."""
        return self.passes(0, NDIM, {})


def axis_variable(text: object, owner: str) -> str:
    """The name `i` of `axis(i)`, which stands for the number of each axis; RuleError for any other text."""
    match = re.fullmatch(r"\s*axis\(\s*(\w+)\s*\)\s*", text) if isinstance(text, str) else None
    if match is None or match[1].isdigit() or name_problem(match[1]):
        said = short(text) if isinstance(text, str) else repr(text)
        raise RuleError(f"each of {owner} is axis(i), with a name for the number of the axis, not {said}")
    return match[1]


def both(condition: Node | None, other: Node | None) -> Node | None:
    """The condition that two of them hold; None stands for one that always does."""
    if condition is None or other is None:
        return other if condition is None else condition
    return node(Op.AND, condition, other)


def _truth(condition: Node, count: int) -> bool | None:
    """Whether a condition holds for tensors of so many dimensions; None where it depends on more."""
    if condition.op in (Op.AND, Op.OR, Op.NOT):
        truths = [_truth(part, count) for part in condition.args]
        if condition.op is Op.NOT:
            return None if truths[0] is None else not truths[0]
        decides = condition.op is Op.OR
        if decides in truths:
            return decides
        return None if None in truths else not decides
    number = number_known(condition, {"ndim": count})
    return None if number is None else bool(number)
