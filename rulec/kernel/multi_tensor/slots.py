"""The slots of reductions: each chunk of a bucket stores its part in a slot, and the parts are joined in a fixed order.

Slots and results are float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.array_api.reductions import REDUCTIONS
from rulec.array_api.slices import Cuts, Pieces
from rulec.compiler.ir import Result, Stage
from rulec.compiler.layout import Layout
from rulec.kernel.place import ROW, TENSOR, place
from rulec.language.expr.node import Op

from .cut import Cut, Lying, Whole

Numbers = np.ndarray[Any, np.dtype[np.float64]]
Truth = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Region:
    """The slots and results of one reduction, for each tensor.

    A tensor has `sizes` results, each joined from `counts` slots: `counts` lines of one slot for each result. `shapes`
    are the shapes of the results in the rule's view; None for a single number for each tensor, joined from a slot for
    each of its chunks.
    """

    name: str
    op: Op
    sizes: Whole
    counts: Whole
    shapes: list[tuple[int, int, int]] | None

    @property
    def code(self) -> int:
        """The number of the reduction in kernels."""
        return REDUCTIONS[self.op].code


def regions(stage: Stage, layout: Layout, chunks: Cut, tensors: Lying, cut: Cut | None = None) -> list[Region]:
    """The regions of a stage's reductions over these chunks.

    Rows and columns are of `tensors`. `cut` is their division into chunks, by default `chunks`.
    """
    return [_region(reduction, layout, chunks, tensors, cut or chunks) for reduction in stage.reduces]


def _region(reduction: Result, layout: Layout, chunks: Cut, tensors: Lying, cut: Cut) -> Region:
    where, op = place(reduction.axes, layout), reduction.value.op
    if where == TENSOR:
        return Region(reduction.name, op, np.ones_like(chunks.counts), chunks.counts, None)
    lines, counts = (tensors.height, cut.across) if where == ROW else (tensors.width, cut.deep)
    pairs = zip(tensors.batch.tolist(), lines.tolist(), strict=True)
    as_rows = "i" in reduction.axes.letters
    shapes = [(batch, n, 1) if as_rows else (batch, 1, n) for batch, n in pairs]
    return Region(reduction.name, op, tensors.batch * lines, counts, shapes)


class TensorSlots:
    """One slot for each chunk of a bucket, reduced to one number for each tensor.

    A slot that no chunk writes keeps the reduction's identity.
    """

    def __init__(self, region: Region) -> None:
        self.op, stops = region.op, np.cumsum(region.counts)
        self._starts, self._stops = stops - region.counts, stops
        # One slot more than chunks: `reduceat` looks up the end of the last range.
        self._slots = np.full(int(region.counts.sum()) + 1, REDUCTIONS[self.op].nothing)
        self._everything = self._ranges(np.arange(len(stops)))

    def _ranges(self, tensors: Whole) -> tuple[Truth, Whole]:
        """Whether each of these tensors has chunks; and the first and the last + 1, for tensors with chunks."""
        starts, stops = self._starts[tensors], self._stops[tensors]
        some = starts < stops
        return some, np.stack([starts[some], stops[some]], axis=1).ravel()

    def arrays(self) -> list[Numbers]:
        """The slots for each tensor: one array for all."""
        return [self._slots] * len(self._starts)

    def finished(self, tensors: Sequence[int] | None) -> Numbers:
        """One number for each of these tensors, or for all."""
        some, ranges = self._everything if tensors is None else self._ranges(np.array(tensors, np.int64))
        results = np.full(len(some), REDUCTIONS[self.op].nothing)
        if len(ranges):
            with np.errstate(all="ignore"):
                results[some] = REDUCTIONS[self.op].ufunc.reduceat(self._slots, ranges)[::2]
        return results


class LineSlots:
    """For each tensor, one slot for each row (or column) of its matrices and each chunk with a part of it.

    Rows and columns are as in memory; results have the shape of the rule's view, one of `shapes`. A slot that no chunk
    writes keeps the reduction's identity.
    """

    def __init__(self, region: Region, shapes: Sequence[tuple[int, int, int]]) -> None:
        self.op, self.shapes = region.op, shapes
        kept = zip(np.maximum(1, region.counts).tolist(), region.sizes.tolist(), strict=True)
        self._slots = [np.full(shape, REDUCTIONS[self.op].nothing) for shape in kept]

    def arrays(self) -> list[Numbers]:
        """The slots of each tensor."""
        return self._slots

    def finished(self, tensors: Sequence[int] | None) -> list[Numbers]:
        """For each of these tensors, or for all, `(batch, rows, 1)` or `(batch, 1, cols)`.

        Some are the slots themselves, valid until the tensor's next pass through this stage.
        """
        reduce = REDUCTIONS[self.op].ufunc.reduce
        fired = range(len(self._slots)) if tensors is None else tensors
        with np.errstate(all="ignore"):
            return [
                (slots[0] if len(slots) == 1 else reduce(slots, axis=0)).reshape(self.shapes[i])
                for i, slots in ((i, self._slots[i]) for i in fired)
            ]


def slots_of(region: Region) -> TensorSlots | LineSlots:
    """The slots of a reduction in main memory."""
    return TensorSlots(region) if region.shapes is None else LineSlots(region, region.shapes)


def of_all(stage: Stage, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The reductions of a stage by name, from the reductions of each tensor: numbers are joined in one array."""
    reduced: dict[str, Any] = {}
    for reduction in stage.reduces:
        values = [each[reduction.name] for each in parts]
        per_tensor = reduction.axes.number
        reduced[reduction.name] = np.array([float(v) for v in values], np.float64) if per_tensor else values
    return reduced


class Places:
    """The places of the slots and of the results of a stage, in one array each, on a device.

    `slots` and `results` are their numbers. `first` has the first slot of each tensor, by region, and `to` the first
    result. With `direct`, a row or column with a single slot has no slot: its result is written directly.
    """

    def __init__(self, regions: Sequence[Region], direct: bool = False) -> None:
        self.regions = regions
        self.slots = self.results = 0
        self.first: list[Whole] = []
        self.to: list[Whole] = []
        for region in regions:
            alone = region.shapes is not None and direct
            slots = np.where(alone & (region.counts <= 1), 0, region.sizes * region.counts)
            self.first.append(self.slots + np.cumsum(slots) - slots)
            self.to.append(self.results + np.cumsum(region.sizes) - region.sizes)
            self.slots += int(slots.sum())
            self.results += int(region.sizes.sum())

    def targets(self, region: int, fired: Whole) -> Whole:
        """The first result of each of these tensors. Single numbers lie side by side, in the order of `fired`."""
        to = self.to[region]
        return to[:1] + np.arange(len(fired)) if self.regions[region].shapes is None else to[fired]

    def views(self, results: Any) -> dict[str, Any]:
        """The results by name: one array of numbers, or for rows and columns the pieces of one, a piece a tensor."""
        views: dict[str, Any] = {}
        for region, to in zip(self.regions, self.to, strict=True):
            start = int(to[:1].sum())
            whole = results[start : start + int(region.sizes.sum())]
            views[region.name] = whole if region.shapes is None else Pieces(whole, Cuts(to - start, region.shapes))
        return views


def chosen(views: Mapping[str, Any], fired: Sequence[int]) -> dict[str, Any]:
    """The results of these tensors alone, from their places by `Places.targets`."""
    return {n: v.chosen(fired) if isinstance(v, Pieces) else v[: len(fired)] for n, v in views.items()}
