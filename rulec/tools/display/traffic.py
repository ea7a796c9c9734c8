"""The memory traffic of a step: bytes per parameter read and written by a program, and by the same program unfused."""

from __future__ import annotations

from dataclasses import dataclass

from rulec.compiler.axes import AxisInference
from rulec.compiler.ir import Program
from rulec.compiler.layout import ITEM_SIZE, Layout
from rulec.language.expr.node import Kind, Node, Op, walk


@dataclass(frozen=True)
class Traffic:
    """Bytes per parameter of one step. Values per row, tensor or group do not count.

    `read` and `written` have the bytes of each buffer, once for every stage that reads or writes it; `read` also has
    each matrix computed between the stages. `values` is the number of operations for each element. `unfused` is their
    bytes if each operation read its operands from memory and wrote its result there.
    """

    read: dict[str, int]
    written: dict[str, int]
    state: dict[str, int]
    values: int
    stores: int
    unfused: int

    @property
    def total(self) -> int:
        """Bytes read and written."""
        return sum(self.read.values()) + sum(self.written.values())


def traffic(program: Program, layout: Layout) -> Traffic:
    """The traffic of a program in a layout."""
    inference = AxisInference(program)
    wide = {b.name for b in program.buffers if b.axes.elementwise}
    size = {b: ITEM_SIZE[d] for b, d in layout.dtypes}
    read: dict[str, int] = {}
    written: dict[str, int] = {}
    operations: list[Node] = []
    for stage in program.stages:
        order = list(walk(stage.roots))
        loaded = {str(n.arg) for n in order if n.op is Op.LOAD}
        for buffer in (b.name for b in program.buffers if b.name in loaded & wide):
            read[buffer] = read.get(buffer, 0) + size[buffer]
        for name in (n for n in stage.reads if program.result(n).axes.elementwise):
            read[name] = read.get(name, 0) + ITEM_SIZE[layout.compute]
        for buffer in (s.buffer for s in stage.stores if s.buffer in wide):
            written[buffer] = written.get(buffer, 0) + size[buffer]
        operations += [n for n in order if n.op.kind is not Kind.LEAF and _is_wide(n, inference)]
    item = ITEM_SIZE[layout.compute]
    unfused = sum(item * (1 + sum(_is_wide(a, inference) for a in n.args)) for n in operations)
    state = {b.name: size[b.name] for b in program.states if b.name in wide}
    stores = sum(len(stage.stores) for stage in program.stages)
    return Traffic(read, written, state, len(operations), stores, unfused)


def _is_wide(value: Node, inference: AxisInference) -> bool:
    return {"i", "j"} <= set(inference.axes(value).letters)
