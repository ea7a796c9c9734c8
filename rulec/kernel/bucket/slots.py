"""Where the chunks of a bucket leave what they reduce, and its finish in main memory in an order that never changes.

Slots and results are float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.arrays.reductions import REDUCTIONS
from rulec.compiler.ir import Result, Stage
from rulec.compiler.layout import Layout
from rulec.kernel.place import ROW, TENSOR, place
from rulec.language.node import Op

from .cut import Cut, Lying, Whole

Numbers = np.ndarray[Any, np.dtype[np.float64]]
Truth = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Region:
    """The slots and results of one reduction, for each tensor.

    A tensor has `sizes` results, each made of `counts` slots, and the slots of all results lie side by side, as many
    times. `shapes` are those of its results, as the rule sees them; None where there is one number for each tensor,
    made of a slot for each of its chunks.
    """

    name: str
    op: Op
    sizes: Whole
    counts: Whole
    shapes: list[tuple[int, int, int]] | None

    @property
    def code(self) -> int:
        """What joins two slots, by the number that kernels know it by."""
        return REDUCTIONS[self.op].code


def regions(stage: Stage, layout: Layout, chunks: Cut, tensors: Lying, cut: Cut | None = None) -> list[Region]:
    """The regions of a stage's reductions over such chunks.

    Rows and columns are those of `tensors`, in chunks cut as `cut`, where those are not the same.
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

    One of a minimum or maximum that no chunk writes keeps what reducing nothing gives.
    """

    def __init__(self, region: Region) -> None:
        self.op, stops = region.op, np.cumsum(region.counts)
        self._starts, self._stops = stops - region.counts, stops
        # One slot more than chunks: `reduceat` looks up the end of the last range.
        self._slots = np.full(int(region.counts.sum()) + 1, REDUCTIONS[self.op].nothing)
        self._everything = self._ranges(np.arange(len(stops)))

    def _ranges(self, tensors: Whole) -> tuple[Truth, Whole]:
        """Which of these tensors have chunks, and the first and last + 1 of those that have."""
        starts, stops = self._starts[tensors], self._stops[tensors]
        some = starts < stops
        return some, np.stack([starts[some], stops[some]], axis=1).ravel()

    def arrays(self) -> list[Numbers]:
        """What the kernel writes into, for each tensor: one array for all."""
        return [self._slots] * len(self._starts)

    def finished(self, tensors: Sequence[int] | None) -> Numbers:
        """One number for each of these tensors, or for all."""
        some, ranges = self._everything if tensors is None else self._ranges(np.array(tensors, np.int64))
        found = np.full(len(some), REDUCTIONS[self.op].nothing)
        if len(ranges):
            with np.errstate(all="ignore"):
                found[some] = REDUCTIONS[self.op].ufunc.reduceat(self._slots, ranges)[::2]
        return found


class LineSlots:
    """For each tensor one slot for each row, or column, of its matrices and each chunk that it passes through.

    The rows and columns are those in memory; results have the shape that the rule sees, one of `shapes`. What no chunk
    writes is what reducing nothing gives.
    """

    def __init__(self, region: Region, shapes: Sequence[tuple[int, int, int]]) -> None:
        self.op, self.shapes = region.op, shapes
        kept = zip(np.maximum(1, region.counts).tolist(), region.sizes.tolist(), strict=True)
        self._slots = [np.full(shape, REDUCTIONS[self.op].nothing) for shape in kept]

    def arrays(self) -> list[Numbers]:
        """What the kernel writes into, for each tensor."""
        return self._slots

    def finished(self, tensors: Sequence[int] | None) -> list[Numbers]:
        """For each of these tensors, or for all, `(batch, rows, 1)` or `(batch, 1, cols)`.

        Some are the slots themselves: they hold until the tensor's next pass through this stage.
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


def of_all(stage: Stage, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The reductions of a stage by name, from those of each tensor: numbers of tensors in one array, others as they
    are."""
    reduced: dict[str, Any] = {}
    for reduction in stage.reduces:
        values = [each[reduction.name] for each in found]
        per_tensor = set(reduction.axes.letters) <= {"k", "n"}
        reduced[reduction.name] = np.array([float(v) for v in values], np.float64) if per_tensor else values
    return reduced


class Places:
    """Where the slots and results of all regions of a stage lie in one array each, on a device.

    `slots` and `results` are how many there are; `first` and `to` are where those of each tensor begin, by region. A
    result of a row or column that has a single slot is that slot where it is `direct`: then there is none beside it.
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
        """Where the results of these tensors begin: single numbers lie side by side, whichever tensors they are of."""
        to = self.to[region]
        return to[:1] + np.arange(len(fired)) if self.regions[region].shapes is None else to[fired]

    def views(self, results: Any) -> dict[str, Any]:
        """The results by name: one array of them all, or per row and column a list of one for each."""
        found: dict[str, Any] = {}
        for region, to in zip(self.regions, self.to, strict=True):
            ranges = zip(to.tolist(), (to + region.sizes).tolist(), strict=True)
            if region.shapes is None:
                start = int(to[:1].sum())
                found[region.name] = results[start : start + len(to)]
            else:
                found[region.name] = [
                    results[a:b].reshape(shape) for (a, b), shape in zip(ranges, region.shapes, strict=True)
                ]
        return found


def chosen(views: Mapping[str, Any], fired: Sequence[int]) -> dict[str, Any]:
    """The results of these tensors alone: see `Places.targets` for where they are."""
    return {n: [v[i] for i in fired] if isinstance(v, list) else v[: len(fired)] for n, v in views.items()}
