"""What one stage of a program needs to run over a bucket: its chunks, slots for its reductions, what comes per call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rulec.compiler.ir import Program, Result, Stage
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.errors import InternalError
from rulec.kernel.moving import Moving, byte_counts, in_memory
from rulec.kernel.place import COL, ROW, TENSOR, address_lines, is_shaped, moving_lines, place

from .chunks import Chunks, Matrices, Policy, Table, flat_chunks, matrix_chunks
from .plan import chunk_columns
from .slots import LineSlots, TensorSlots


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
    """Works out what each stage of a program needs over tensors of these sizes and views, of a machine's `policy`.

    With `flat`, chunks are elements alike in every stage, whatever it reads.
    """

    def __init__(
        self, backend: str, program: Program, layout: Layout, sizes: Sequence[int], views: Sequence[MatrixView],
        policy: Policy, flat: bool = False,
    ) -> None:  # fmt: skip
        self._backend, self._policy = backend, policy
        self.program, self.layout, self.sizes = program, layout, sizes
        self.lines = address_lines(program)
        self.columns = chunk_columns(program, layout)
        if self.columns > 3 and len(views) != len(sizes):
            raise InternalError(f"{program.name} sees matrices: bind its {backend} kernel with a view of each tensor")
        self._views = views if self.columns > 3 else ()
        self._only_flat = flat
        self._cuts: dict[str, tuple[Chunks, list[Matrices]]] = {}

    def work(self, stage: Stage) -> Work:
        """What a stage needs."""
        chunks, matrices = self._cut(stage)
        spans = chunks.spans(range(len(self.sizes)))
        moving = [self._moving(name) for name in moving_lines(self.program, stage)]
        slots = {r.name: self._slots(r, chunks, matrices) for r in stage.reduces}
        return Work(chunks, spans, moving, slots)

    def _cut(self, stage: Stage) -> tuple[Chunks, list[Matrices]]:
        """A stage's chunks, and the matrices that they are of; stages that are cut alike share them."""
        tall = any(place(r.axes, self.layout) == COL for r in stage.reduces)
        shaped = is_shaped(self.program, stage, self.layout)
        kind = ("tall" if tall else "wide") if shaped else "flat"
        if kind not in self._cuts:
            matrices = [Matrices(*in_memory(view, self.layout.transposed), self._policy, tall) for view in self._views]
            flat = self._only_flat or not shaped
            chunks = (
                flat_chunks(self.sizes, self._policy, self.columns) if flat else matrix_chunks(matrices, self._policy)
            )
            self._cuts[kind] = (chunks, matrices)
        return self._cuts[kind]

    def _slots(self, reduction: Result, chunks: Chunks, matrices: Sequence[Matrices]) -> TensorSlots | LineSlots:
        op, where = reduction.value.op, place(reduction.axes, self.layout)
        if where == TENSOR:
            return TensorSlots(op, chunks)
        return LineSlots(op, matrices, rows=where == ROW, as_rows="i" in reduction.axes.letters)

    def _moving(self, name: str) -> Moving:
        sizes = byte_counts(self.program, self.layout, name, self.sizes, self._views)
        return Moving(self._backend, name, self.lines.index(name), sizes)
