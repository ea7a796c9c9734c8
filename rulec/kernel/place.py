"""The places of values in memory: one for each element, row, column or matrix of a tensor, or one for the tensor.

A printed source and its caller both take them from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rulec.compiler.ir import Axes, Program, Stage
from rulec.compiler.layout import Layout, kernel_buffers
from rulec.language.expr.node import Op, walk

ELEMENT, ROW, COL, MATRIX, TENSOR = "element", "row", "col", "matrix", "tensor"


def place(axes: Axes, layout: Layout) -> str:
    """The place of a value with these axes, with rows and columns as in memory."""
    letters = set(axes.letters)
    if {"i", "j"} <= letters:
        return ELEMENT
    if "i" in letters:
        return COL if layout.transposed else ROW
    if "j" in letters:
        return ROW if layout.transposed else COL
    return MATRIX if "b" in letters else TENSOR


def is_shaped(program: Program, stage: Stage, layout: Layout) -> bool:
    """Whether a stage needs the row or column of an element."""
    narrow = [*(program.result(name) for name in stage.reads), *stage.reduces]
    return bool({ROW, COL, MATRIX} & {place(r.axes, layout) for r in narrow})


def used_buffers(program: Program, stage: Stage) -> list[str]:
    """The buffers of the parameter's shape that a stage loads or stores, in the program's order."""
    used = {str(n.arg) for n in walk(stage.roots) if n.op is Op.LOAD} | {s.buffer for s in stage.stores}
    return [b.name for b in kernel_buffers(program) if b.name in used]


def address_lines(program: Program) -> list[str]:
    """The lines of an address table, with one address for each tensor: buffers, vectors, and slots of reductions.

    A reduction of a whole tensor has one slot for each chunk of the bucket. A reduction of rows or columns has a region
    of slots for each tensor.
    """
    reduced = [r.name for stage in program.stages for r in stage.reduces]
    return [b.name for b in kernel_buffers(program)] + [v.name for v in program.vectors] + reduced


def moving_lines(program: Program, stage: Stage) -> list[str]:
    """The arguments of each call of a stage besides the gradient: scratch, inputs and vectors."""
    roles = {b.name: b.role for b in program.buffers}
    return [*(b for b in used_buffers(program, stage) if roles[b] in ("scratch", "input")), *stage.reads]


def bound_arrays(
    program: Program, params: Sequence[Any], states: Sequence[Mapping[str, Any]]
) -> dict[str, Sequence[Any]]:
    """Buffer -> the array of each tensor bound to a kernel: parameters, and states of their shape."""
    found: dict[str, Sequence[Any]] = {}
    for buffer in kernel_buffers(program):
        if buffer.role in ("param", "state"):
            found[buffer.name] = params if buffer.role == "param" else [s[buffer.name] for s in states]
    return found
