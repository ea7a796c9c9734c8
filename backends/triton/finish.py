"""Slots and results of a stage's reductions, and the work of the kernel that makes the one of the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.compiler.ir import Result, Stage
from rulec.compiler.layout import Layout
from rulec.compiler.reductions import REDUCTIONS
from rulec.kernel.place import ROW, TENSOR, place

from .cut import Cut, ShapedCut, Whole
from .plan import FINISHED

#: The slots of a result that one lane joins, one after the other: of more, all lanes take some.
MOST_ROUNDS = 64


@dataclass(frozen=True)
class Region:
    """Where the slots and results of one reduction are, for each tensor.

    A tensor has `sizes` results, each made of `counts` slots, and the slots of all results lie side by side, as many
    times. They begin at `slots`, results at `to`. `shapes` are those of each tensor's results, None where there is one.
    """

    reduction: Result
    slots: Whole
    sizes: Whole
    counts: Whole
    to: Whole
    shapes: list[tuple[int, int, int]] | None

    def jobs(self, fired: Whole, together: bool) -> Whole:
        """Lines of `jobs` (see the printed `finish`) for these tensors, results per tensor side by side."""
        sizes, to = self.sizes[fired], self.to[fired]
        if self.shapes is None and not together:
            to = self.to[0] + np.arange(len(fired))
        one = (sizes == 1) | (self.counts[fired] > MOST_ROUNDS)
        made = np.where(one, 1, FINISHED)
        parts = -(-sizes // made)
        each = np.repeat(np.arange(len(fired)), parts)
        done = (np.arange(len(each)) - np.repeat(np.cumsum(parts) - parts, parts)) * made[each]
        single, size, counts = one[each], sizes[each], self.counts[fired[each]]
        columns = [
            np.full(len(each), REDUCTIONS[self.reduction.value.op].code), single,
            self.slots[fired[each]] + done, to[each] + done,
            np.where(single, -(-counts // FINISHED), counts), np.where(single, FINISHED * size, size),
            np.where(single, size, 1), np.where(single, counts, np.minimum(size - done, FINISHED)),
        ]  # fmt: skip
        return np.stack([np.asarray(c, np.int64) for c in columns], axis=1)


class Regions:
    """The slots and results of all reductions of a stage over a bucket: how many there are, and where."""

    def __init__(self, stage: Stage, layout: Layout, cut: Cut) -> None:
        self.slots = self.results = 0
        self.found = [self._region(r, layout, cut) for r in stage.reduces]

    def _region(self, reduction: Result, layout: Layout, cut: Cut) -> Region:
        where = place(reduction.axes, layout)
        if where == TENSOR:
            counts, sizes = cut.counts, np.ones(len(cut.counts), np.int64)
            return self._placed(reduction, sizes, counts, None)
        assert isinstance(cut, ShapedCut)
        length = cut.height if where == ROW else cut.width
        counts = cut.across if where == ROW else cut.deep
        lying = "i" in reduction.axes.letters
        shapes = [(int(b), int(n), 1) if lying else (int(b), 1, int(n)) for b, n in zip(cut.batch, length, strict=True)]
        sizes = cut.batch * length
        return self._placed(reduction, sizes, counts, shapes)

    def _placed(
        self, reduction: Result, sizes: Whole, counts: Whole, shapes: list[tuple[int, int, int]] | None
    ) -> Region:
        slots = sizes * counts
        first, to = self.slots + np.cumsum(slots) - slots, self.results + np.cumsum(sizes) - sizes
        self.slots += int(slots.sum())
        self.results += int(sizes.sum())
        return Region(reduction, first, sizes, counts, to, shapes)

    def starts(self) -> dict[str, Whole]:
        """Where each tensor's slots begin, by reduction: columns of `known`."""
        return {region.reduction.name: region.slots for region in self.found}

    def jobs(self, fired: Whole, together: bool) -> Whole:
        """The lines of `jobs` for these tensors; `together` where they are all of the bucket."""
        return np.concatenate([region.jobs(fired, together) for region in self.found])

    def views(self, results: Any) -> Mapping[str, Any]:
        """The results by name: one tensor of them all, or per row and column a list of one for each."""
        found: dict[str, Any] = {}
        for region in self.found:
            if region.shapes is None:
                found[region.reduction.name] = results[int(region.to[0]) :][: len(region.to)]
            else:
                whole = results[int(region.to[0]) :][: int(region.sizes.sum())]
                parts = whole.split(region.sizes.tolist())
                found[region.reduction.name] = [p.view(s) for p, s in zip(parts, region.shapes, strict=True)]
        return found


def chosen(views: Mapping[str, Any], fired: Sequence[int]) -> dict[str, Any]:
    """The results of these tensors alone: see `Region.jobs` for where they are."""
    return {n: [v[i] for i in fired] if isinstance(v, list) else v[: len(fired)] for n, v in views.items()}
