"""What one stage of a program needs to run over a bucket: its chunks, slots for its reductions, what comes per call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rulec.backend.layout import ITEM_SIZE, Layout
from rulec.compiler.ir import Program, Result, Stage
from rulec.compiler.view import MatrixView
from rulec.errors import InternalError

from ..plan import COL, ROW, TENSOR, address_lines, is_shaped, moving_lines, place
from .chunks import Chunks, Matrices, Table, flat_chunks, matrix_chunks
from .plan import chunk_columns
from .slots import LineSlots, TensorSlots


@dataclass(frozen=True)
class Moving:
    """What comes with each call: its line in the address table, and the bytes of its array for each tensor."""

    name: str
    line: int
    sizes: Sequence[int]

    def take(self, scratch: Mapping[str, Sequence[Any]], fired: Sequence[int]) -> Sequence[Any]:
        """The arrays of these tensors; InternalError where they are missing or of another size."""
        arrays = scratch.get(self.name, ())
        if [x.nbytes for x in arrays] != [self.sizes[i] for i in fired]:
            found = f"{len(arrays)} arrays of {[x.nbytes for x in arrays][:5]} bytes"
            raise InternalError(f"the cpu kernel needs {self.name!r} for {len(fired)} tensors and was given {found}")
        return arrays


@dataclass
class Work:
    """What a stage needs."""

    chunks: Chunks
    spans: Table
    moving: list[Moving]
    slots: dict[str, TensorSlots | LineSlots]

    def spans_of(self, fired: tuple[int, ...] | None) -> Table:
        """The spans of these tensors, or of all."""
        return self.spans if fired is None else self.chunks.spans(fired)


class Planner:
    """Works out what each stage of a program needs over tensors of these sizes and views.

    With `flat`, chunks are elements alike in every stage, whatever it reads.
    """

    def __init__(
        self, program: Program, layout: Layout, sizes: Sequence[int], views: Sequence[MatrixView], flat: bool
    ) -> None:
        self.program, self.layout, self.sizes = program, layout, sizes
        self.lines = address_lines(program)
        self.columns = chunk_columns(program, layout)
        if self.columns > 3 and len(views) != len(sizes):
            raise InternalError(f"{program.name} sees matrices: bind its cpu kernel with a view of each tensor")
        self._views = views if self.columns > 3 else ()
        self._only_flat = flat
        self._cuts: dict[str, tuple[Chunks, list[Matrices]]] = {}

    def work(self, stage: Stage) -> Work:
        """What a stage needs."""
        chunks, matrices = self._cut(stage)
        spans = chunks.spans(range(len(self.sizes)))
        moving = [Moving(name, self.lines.index(name), self._bytes(name)) for name in moving_lines(self.program, stage)]
        slots = {r.name: self._slots(r, chunks, matrices) for r in stage.reduces}
        return Work(chunks, spans, moving, slots)

    def _cut(self, stage: Stage) -> tuple[Chunks, list[Matrices]]:
        """A stage's chunks, and the matrices that they are of; stages that are cut alike share them."""
        tall = any(place(r.axes, self.layout) == COL for r in stage.reduces)
        shaped = is_shaped(self.program, stage, self.layout)
        kind = ("tall" if tall else "wide") if shaped else "flat"
        if kind not in self._cuts:
            matrices = [_matrices(view, self.layout, tall) for view in self._views]
            flat = self._only_flat or not shaped
            chunks = flat_chunks(self.sizes, self.columns) if flat else matrix_chunks(matrices)
            self._cuts[kind] = (chunks, matrices)
        return self._cuts[kind]

    def _slots(self, reduction: Result, chunks: Chunks, matrices: Sequence[Matrices]) -> TensorSlots | LineSlots:
        op, where = reduction.value.op, place(reduction.axes, self.layout)
        if where == TENSOR:
            return TensorSlots(op, chunks)
        return LineSlots(op, matrices, rows=where == ROW, as_rows="i" in reduction.axes.letters)

    def _bytes(self, name: str) -> list[int]:
        """The bytes of what a line of the address table leads to, for each tensor."""
        vector = next((v for v in self.program.vectors if v.name == name), None)
        if vector is None:
            return [ITEM_SIZE[self.layout.dtype(name)] * size for size in self.sizes]
        letters, item = set(vector.axes.letters), ITEM_SIZE[self.layout.compute]
        if {"i", "j"} <= letters:
            return [item * size for size in self.sizes]
        return [
            item * v.batch * (v.rows if "i" in letters else 1) * (v.cols if "j" in letters else 1) for v in self._views
        ]


def _matrices(view: MatrixView, layout: Layout, tall: bool) -> Matrices:
    """A tensor as it lies in memory."""
    if view.transposed != layout.transposed:
        raise InternalError(f"a tensor of shape {view.shape} is not seen as its bucket's layout says")
    height, width = (view.cols, view.rows) if layout.transposed else (view.rows, view.cols)
    return Matrices(view.batch, height, width, tall)
