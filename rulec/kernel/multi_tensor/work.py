"""The data of a stage over a bucket in main memory: chunks, slots, and the arguments of each call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rulec.compiler.ir import Program, Stage
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.kernel.multi_tensor.arguments import Moving
from rulec.kernel.place import COL, is_shaped, place
from rulec.kernel.quantized import coded_lines

from .chunks import Chunks, Policy
from .cut import Cut, Whole
from .plan import CHUNK_COLUMNS, FLAT_COLUMNS, chunk_columns
from .slots import LineSlots, TensorSlots, regions, slots_of
from .tensors import Tensors


@dataclass
class Work:
    """The data of a stage."""

    chunks: Chunks
    spans: Whole
    moving: list[Moving]
    slots: dict[str, TensorSlots | LineSlots]

    def spans_of(self, fired: tuple[int, ...] | None) -> Whole:
        """The spans of these tensors, or of all."""
        return self.spans if fired is None else self.chunks.spans(fired)


class Planner:
    """Prepares the data of each stage of a program over tensors of these sizes and views, by a machine's `policy`.

    With `flat`, chunks have no matrices in any stage.
    """

    def __init__(
        self, backend: str, program: Program, layout: Layout, sizes: Sequence[int], views: Sequence[MatrixView],
        policy: Policy, flat: bool = False,
    ) -> None:  # fmt: skip
        self._tensors = Tensors(backend, program, layout, sizes, views)
        self.lines = coded_lines(program, layout)
        self._policy, self._only_flat = policy, flat
        self._flat_columns = [*FLAT_COLUMNS, *[""] * (chunk_columns(program, layout) - len(FLAT_COLUMNS))]
        self._known: dict[str, tuple[Chunks, Cut]] = {}

    def work(self, stage: Stage) -> Work:
        """The data of a stage."""
        tensors = self._tensors
        chunks, cut = self._chunks(stage)
        stage_regions = regions(stage, tensors.layout, chunks.cut, tensors.lying, cut)
        slots = {region.name: slots_of(region) for region in stage_regions}
        return Work(chunks, chunks.spans(range(len(tensors.sizes))), tensors.moving(stage, self.lines), slots)

    def _chunks(self, stage: Stage) -> tuple[Chunks, Cut]:
        """A stage's chunks, and the cut of its rows and columns. Stages of one kind share them."""
        tensors, policy = self._tensors, self._policy
        vectors = [*stage.reduces, *map(tensors.program.result, stage.reads)]
        tall = any(place(r.axes, tensors.layout) == COL for r in vectors)
        shaped = is_shaped(tensors.program, stage, tensors.layout)
        kind = ("tall" if tall else "wide") if shaped else "flat"
        if kind not in self._known:
            flat = policy.flat(tensors.seen(False))
            cut = policy.cut(tensors.seen(True), tall) if shaped else flat
            if shaped and not self._only_flat:
                chunks = Chunks(cut, CHUNK_COLUMNS, policy)
            else:
                chunks = Chunks(flat, self._flat_columns, policy)
            self._known[kind] = chunks, cut
        return self._known[kind]
