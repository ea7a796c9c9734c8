"""The sums of a stage for statistics alone, which may be added up in float32 first.

See docs/watch.md. A sum of the rule keeps its order and its bits, with statistics and without.
"""

from __future__ import annotations

from rulec.compiler.ir import Program, Result, Stage
from rulec.compiler.layout import Layout
from rulec.language.expr.node import Node, Op, const


def partial_sums(program: Program, layout: Layout, stage: Stage) -> list[Result]:
    """The sums of a stage that statistics alone read; none where the stage computes in float64."""
    if layout.compute != "float32":
        return []
    return [r for r in stage.reduces if r.value.op is Op.SUM and r.name in program.measured]


def counted(operand: Node) -> tuple[Node, bool] | None:
    """The condition that a sum counts, and whether it counts where it holds; None for any other sum."""
    if operand.op is not Op.WHERE:
        return None
    numbers = {(const(1), const(0)): True, (const(0), const(1)): False}
    holds = numbers.get((operand.args[1], operand.args[2]))
    return None if holds is None else (operand.args[0], holds)
