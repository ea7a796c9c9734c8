"""What each stage of a program needs to run over a bucket: its blocks, its addresses, slots for its totals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.compiler.layout import ITEM_SIZE
from rulec.kernel.bucket.cut import Cut, Whole
from rulec.kernel.bucket.slots import regions
from rulec.kernel.bucket.tensors import Tensors
from rulec.kernel.moving import Moving
from rulec.kernel.nest import Nest
from rulec.kernel.place import COL, ELEMENT, MATRIX

from .chunks import Flat, Tiles
from .memory import Memory
from .plan import bound_lines, given_lines, kernel_name, pack_width
from .slots import Slots


@dataclass
class Work:
    """What a stage needs; `table` has a row for each block.

    `bound` and `given` are the columns of the address tables that it reads and that hold elements; `even` says for each
    tensor whether all its lines begin at a multiple of a pack.
    """

    kernel: str
    cut: Cut
    table: Whole
    moving: list[Moving]
    slots: Slots
    bound: list[int]
    given: list[int]
    even: np.ndarray[Any, np.dtype[np.bool_]]

    def tables(self, fired: Sequence[int]) -> tuple[Whole, Whole]:
        """The blocks of these tensors, and what joins their totals."""
        return self.table[self.cut.rows(fired)], self.slots.finish(fired)


class Planner:
    """Works out what each stage of a program needs over these tensors."""

    def __init__(self, tensors: Tensors, memory: Memory) -> None:
        self._tensors, self._memory = tensors, memory
        self._bound, self._given = bound_lines(tensors.program), given_lines(tensors.program)
        self._cuts: dict[Flat | Tiles, tuple[Cut, Whole]] = {}

    def work(self, index: int) -> Work | None:
        """What a stage needs; None where it computes nothing."""
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
        given = [self._given.index(name) for name in [*nest.buffers, *wide] if name in self._given]
        moving = tensors.moving(stage, self._given)
        return Work(kernel_name(program, index), cut, table, moving, slots, bound, given, even)

    def _cut(self, nest: Nest, pack: int) -> tuple[Cut, Whole]:
        """How a stage is cut, and the words of its blocks; stages that are cut alike share them."""
        columns = bool(nest.totals(COL))
        how = Tiles(pack, columns, nest.sees(COL) or nest.sees(MATRIX)) if nest.shaped else Flat(_moved(nest))
        if how not in self._cuts:
            cut = how.cut(self._tensors.seen(nest.shaped))
            self._cuts[how] = cut, how.table(cut)
        return self._cuts[how]


def _moved(nest: Nest) -> int:
    """The bytes of an element that a stage reads and writes."""
    return sum(ITEM_SIZE[nest.layout.dtype(name)] for name in [*nest.buffers, *nest.stored])
