"""Operands and results of `newton_schulz` in memory of 16 bits, to which it rounds them anyway: half of the traffic.

The bits of a step are the same as with memory in the dtype of arithmetic.
"""

from __future__ import annotations

from dataclasses import replace

from rulec.compiler.ir import Program
from rulec.compiler.layout import ITEM_SIZE, Layout
from rulec.language.expr.node import Node, Op, walk
from rulec.language.expr.static import settings


def narrowed(program: Program, layout: Layout) -> Layout:
    """The layout with such scratch and results of a program in the dtype of 16 bits of the function."""
    outside = walk([*program.between, *([] if program.skip is None else [program.skip])])
    uses: dict[Node, list[tuple[Node, int]]] = {}
    for value in outside:
        for place, operand in enumerate(value.args):
            uses.setdefault(operand, []).append((value, place))
    return replace(
        layout,
        dtypes=tuple((b, _scratch_dtype(program, b, uses) or dtype) for b, dtype in layout.dtypes),
        results=tuple((name, dtype) for name, dtype in _results(program, uses).items() if dtype),
    )


def _scratch_dtype(program: Program, buffer: str, uses: dict[Node, list[tuple[Node, int]]]) -> str:
    """The dtype that every reader rounds a scratch buffer to; empty where there is none, or a kernel reads it."""
    if program.buffer(buffer).role != "scratch":
        return ""
    if any(n.op is Op.LOAD and n.arg == buffer for stage in program.stages for n in walk(stage.roots)):
        return ""
    readers = [use for value, each in uses.items() if value.op is Op.LOAD and value.arg == buffer for use in each]
    dtypes = {_rounds(value) if place == 0 else "" for value, place in readers}
    return dtypes.pop() if len(dtypes) == 1 else ""


def _results(program: Program, uses: dict[Node, list[tuple[Node, int]]]) -> dict[str, str]:
    """The dtype of each result of the parameter's shape that only kernels read, by name."""
    stored = {s.value for s in program.finish}
    alone = [r for r in program.vectors if r.axes.elementwise and r.value not in uses and r.value not in stored]
    return {r.name: _rounds(r.value) for r in alone}


def _rounds(value: Node) -> str:
    """The dtype of 16 bits that a function rounds its operand and its result to; empty for any other."""
    dtype = str(settings(value).get("dtype")) if value.op is Op.NEWTON_SCHULZ else ""
    return dtype if ITEM_SIZE.get(dtype) == 2 else ""
