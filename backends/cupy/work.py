"""What each stage of a program needs to run over a bucket: its blocks, its addresses, slots for its totals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.compiler.ir import Program, Result, Stage
from rulec.compiler.layout import ITEM_SIZE, Layout
from rulec.compiler.view import MatrixView
from rulec.errors import InternalError
from rulec.kernel.moving import Moving, byte_counts, in_memory
from rulec.kernel.nest import Nest
from rulec.kernel.place import COL, ELEMENT, MATRIX, ROW, TENSOR, is_shaped, place, used_buffers

from .chunks import Chunks, Matrices, Table, flat_chunks, tiles
from .memory import Memory
from .plan import bound_lines, given_lines, kernel_name, pack_width
from .slots import LineSlots, TensorSlots, finish_table

Whole = np.ndarray[Any, np.dtype[np.int64]]


@dataclass
class Work:
    """What a stage needs.

    `bound` and `given` are the columns of the address tables that it reads and that hold elements; `even` says for each
    tensor whether all its lines begin at a multiple of a pack.
    """

    kernel: str
    chunks: Chunks
    moving: list[Moving]
    slots: dict[str, TensorSlots | LineSlots]
    bound: list[int]
    given: list[int]
    even: np.ndarray[Any, np.dtype[np.bool_]]

    def tables(self, fired: Sequence[int]) -> tuple[Table, Table]:
        """The chunks of these tensors, and what joins their totals."""
        return self.chunks.of(fired), finish_table([*self.slots.values()], fired)


class Planner:
    """Works out what each stage of a program needs over tensors of these sizes and views."""

    def __init__(
        self, program: Program, layout: Layout, sizes: Sequence[int], views: Sequence[MatrixView], memory: Memory
    ) -> None:
        self.program, self.layout, self.sizes, self.memory = program, layout, sizes, memory
        self.bound, self.given = bound_lines(program), given_lines(program)
        shaped = any(is_shaped(program, stage, layout) for stage in program.stages)
        if shaped and len(views) != len(sizes):
            raise InternalError(f"{program.name} sees matrices: bind its cupy kernel with a view of each tensor")
        self._views = views if shaped else ()
        self._tiles: dict[tuple[Matrices, ...], Chunks] = {}

    def work(self, index: int) -> Work | None:
        """What a stage needs; None where it computes nothing."""
        stage = self.program.stages[index]
        if not stage.roots:
            return None
        pack = pack_width(self.program, self.layout, stage)
        shaped = is_shaped(self.program, stage, self.layout)
        matrices = [self._matrices(view, stage, pack) for view in self._views] if shaped else []
        chunks = self._tiled(matrices) if shaped else flat_chunks(self.sizes, self._moved(stage))
        even = np.array([m.width % pack == 0 for m in matrices] if shaped else [True] * len(self.sizes), np.bool_)
        slots = {r.name: self._slots(r, chunks, matrices) for r in stage.reduces}
        nest = Nest(self.program, self.layout, stage)
        wide = [v.name for v in nest.read(ELEMENT, COL)]
        bound = [self.bound.index(name) for name in nest.buffers if name in self.bound]
        given = [self.given.index(name) for name in [*nest.buffers, *wide] if name in self.given]
        return Work(kernel_name(self.program, index), chunks, self._moving(stage), slots, bound, given, even)

    def _tiled(self, matrices: Sequence[Matrices]) -> Chunks:
        """The tiles of these matrices, which stages that are cut alike share."""
        key = tuple(matrices)
        if key not in self._tiles:
            self._tiles[key] = tiles(matrices)
        return self._tiles[key]

    def _moving(self, stage: Stage) -> list[Moving]:
        names = [n for n in used_buffers(self.program, stage) if n in self.given and n != "g"]
        sizes = {n: byte_counts(self.program, self.layout, n, self.sizes, self._views) for n in [*names, *stage.reads]}
        return [Moving("cupy", n, self.given.index(n), each) for n, each in sizes.items()]

    def _moved(self, stage: Stage) -> int:
        """The bytes of an element that a stage reads and writes."""
        stored = [s.buffer for s in stage.stores]
        names = [*used_buffers(self.program, stage), *stored]
        return sum(ITEM_SIZE[self.layout.dtype(name)] for name in names)

    def _matrices(self, view: MatrixView, stage: Stage, pack: int) -> Matrices:
        """A tensor as it lies in memory."""
        nest = Nest(self.program, self.layout, stage)
        apart = nest.sees(COL) or nest.sees(MATRIX)
        return Matrices(*in_memory(view, self.layout.transposed), pack, bool(nest.totals(COL)), apart)

    def _slots(self, reduction: Result, chunks: Chunks, matrices: Sequence[Matrices]) -> TensorSlots | LineSlots:
        where = place(reduction.axes, self.layout)
        if where == TENSOR:
            return TensorSlots(reduction, chunks, self.memory)
        return LineSlots(reduction, matrices, where == ROW, self.memory)
