"""The work of each stage over a bucket: its blocks, its addresses, slots for its totals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.compiler.layout import ITEM_SIZE
from rulec.kernel.multi_tensor.arguments import Moving
from rulec.kernel.multi_tensor.cut import Cut, Whole
from rulec.kernel.multi_tensor.slots import regions
from rulec.kernel.multi_tensor.tensors import Tensors
from rulec.kernel.nest import Nest
from rulec.kernel.place import COL, ELEMENT, MATRIX

from .chunks import Flat, Tiles
from .memory import Memory
from .plan import bound_lines, given_lines, kernel_name, pack_width
from .slots import Slots


@dataclass
class Work:
    """The work of a stage; `table` has a row for each block.

    `bound` and `per_call` are the columns, in the tables of fixed addresses and of a call, for its arrays of elements.
    `even` is true for a tensor with all lines at multiples of a pack.
    """

    kernel: str
    cut: Cut
    table: Whole
    moving: list[Moving]
    slots: Slots
    bound: list[int]
    per_call: list[int]
    even: np.ndarray[Any, np.dtype[np.bool_]]

    def tables(self, fired: Sequence[int]) -> tuple[Whole, Whole]:
        """The blocks of these tensors, and the work of joining their totals."""
        return self.table[self.cut.rows(fired)], self.slots.finish(fired)


class Planner:
    """Plans the work of each stage of a program over these tensors."""

    def __init__(self, tensors: Tensors, memory: Memory) -> None:
        self._tensors, self._memory = tensors, memory
        self._bound, self._per_call = bound_lines(tensors.program), given_lines(tensors.program)
        self._cuts: dict[Flat | Tiles, tuple[Cut, Whole]] = {}

    def work(self, index: int) -> Work | None:
        """The work of a stage; None where it computes nothing."""
        tensors = self._tensors
        program, layout, stage = tensors.program, tensors.layout, tensors.program.stages[index]
        if not stage.roots:
            return None
        nest, pack = Nest(program, layout, stage), pack_width(program, layout, stage)
        cut, table = self._cut(nest, pack)
        even = tensors.lying.width % pack == 0 if nest.shaped else np.ones(len(tensors.sizes), np.bool_)
        slots = Slots(regions(stage, layout, cut, tensors.lying), self._memory)
        wide = [v.name for v in nest.read(ELEMENT, COL)]
        bound = [self._bound.index(name) for name in nest.buffers if name in self._bound]
        per_call = [self._per_call.index(name) for name in [*nest.buffers, *wide] if name in self._per_call]
        moving = tensors.moving(stage, self._per_call)
        return Work(kernel_name(program, index), cut, table, moving, slots, bound, per_call, even)

    def _cut(self, nest: Nest, pack: int) -> tuple[Cut, Whole]:
        """The cut of a stage into blocks, and the words of these; stages with the same cut share them."""
        columns = bool(nest.totals(COL))
        longest = max([1, *(form.block for _, form in nest.layout.formats)])
        how = Tiles(pack, columns, nest.sees(COL) or nest.sees(MATRIX)) if nest.shaped else Flat(_moved(nest), longest)
        if how not in self._cuts:
            cut = how.cut(self._tensors.seen(nest.shaped))
            self._cuts[how] = cut, how.table(cut)
        return self._cuts[how]


def _moved(nest: Nest) -> int:
    """The bytes read and written in a stage for one element."""
    return sum(ITEM_SIZE[nest.layout.dtype(name)] for name in [*nest.buffers, *nest.stored])
