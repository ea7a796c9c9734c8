"""The values known before a step: conditions that choose a program, and counts such as extents, with their ranges.

A condition of shape facts and static hyper-parameters is decided when a kernel is made. A count may also depend on
other hyper-parameters and on `t`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from rulec.compiler.ir import Program
from rulec.language.expr.arithmetic import NUMPY, number_known
from rulec.language.expr.counts import Count
from rulec.language.expr.node import NUMBERS, Kind, Node, Op, walk
from rulec.language.rule_data import RuleData
from rulec.language.source import rule_error

#: The leaves of what is known before a step.
FORESEEN = (Op.CONST, Op.HYPER, Op.STEP, Op.FACT)


def decide(condition: Node, known: Mapping[str, float]) -> bool | None:
    """The truth of a condition of shape facts and static hyper-parameters; None where it depends on more."""
    number = number_known(condition, known)
    return None if number is None else bool(number)


def is_made_of(value: Node, leaves: Container[Op]) -> bool:
    """Whether a value is arithmetic on these leaves alone."""
    return all(n.op in leaves if n.op.kind is Kind.LEAF else n.op in NUMPY for n in walk([value]))


def foreseen(count: Count, rule: RuleData) -> Count:
    """The same count; RuleError where it is not known before a step, or a `fixed` one not when a kernel is made."""
    leaves = (Op.CONST, Op.FACT, Op.HYPER) if count.fixed else FORESEEN
    for value in count.values:
        if not is_made_of(value, leaves):
            parts = f"hyper-parameters{'' if count.fixed else ', t'}"
            raise rule_error(
                f"{count.what} must be known before a step: make it of numbers, {parts} and shape facts", count.span
            )
        differing = [str(n.arg) for n in walk([value]) if n.op is Op.FACT and n.arg in NUMBERS]
        if differing and count.fixed:
            raise rule_error(
                f"{count.what} depends on {differing[0]}, which differs between tensors of one kernel: make it of "
                f"numbers, static hyper-parameters and shape facts", count.span,
            )  # fmt: skip
        moving = [str(n.arg) for n in walk([value]) if n.op is Op.HYPER and not rule.hyper[str(n.arg)].static]
        if moving and count.fixed:
            raise rule_error(
                f"{count.what} depends on {moving[0]}, which may change between steps: declare {moving[0]} static",
                count.span,
            )
    return count


def check_counts(program: Program, known: Mapping[str, float]) -> Program:
    """The same program; RuleError at the place of a count outside its range at these values.

    `known` has values of hyper-parameters and of shape facts. Counts of other values are not checked.
    """
    for count in program.counts:
        if problem := count.problem(known):
            raise rule_error(problem, count.span)
    return program
