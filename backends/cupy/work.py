"""The work of each stage over a bucket for CUDA: blocks of the grid, addresses, and slots for totals.

Chunks have lengths, and tiles of matrices have sizes, for the blocks of a grid. Totals in slots are combined to results
in an order that never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.compiler.layout import ITEM_SIZE
from rulec.kernel.multi_tensor.arguments import Moving
from rulec.kernel.multi_tensor.cut import Cut, Lying, Tensors, Whole, counted, parts
from rulec.kernel.multi_tensor.slots import Places, Region, chosen, regions
from rulec.kernel.nest import Nest
from rulec.kernel.place import COL, ELEMENT, MATRIX

from .memory import Memory
from .plan import CHUNK, FINISH, THREADS, TILE, bound_lines, given_lines, kernel_name, pack_width


@dataclass
class Work:
    """The work of a stage; `table` has a row for each block.

    `bound` and `per_call` are the columns, in the tables of fixed addresses and of a call, for its arrays of elements.
    `gradient` is the column of the gradient among the latter; None where the stage does not read it. `even` is true for
    a tensor with all lines at multiples of a pack.
    """

    kernel: str
    cut: Cut
    table: Whole
    moving: list[Moving]
    slots: Slots
    bound: list[int]
    per_call: list[int]
    gradient: int | None
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
        gradient = self._per_call.index("g") if "g" in nest.buffers and len(bound) + len(per_call) > 1 else None
        return Work(kernel_name(program, index), cut, table, moving, slots, bound, per_call, gradient, even)

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


#: Elements in a chunk of a small tensor and of a large one, by the most bytes that an element moves.
CHUNKS = {8: (8192, 32768), 16: (4096, 16384), 64: (2048, 8192)}
#: Elements from which a tensor is no longer small.
LARGE = 1 << 22

#: Elements in a tile, about.
TILE_SIZE = 8192
#: Columns in a tile, at most.
WIDEST = 4096
#: Tiles one above the other in one matrix, at most, where columns are reduced.
MOST_PIECES = 256


def chunk_length(size: int, moved: int) -> int:
    """The elements in a chunk of a tensor of `size` elements, with `moved` bytes moved for each."""
    small, large = next(lengths for most, lengths in CHUNKS.items() if moved <= most or most == max(CHUNKS))
    return large if size >= LARGE else small


@dataclass(frozen=True)
class Flat:
    """Chunks of at least `least` neighbouring elements, a power of two, with `moved` bytes moved for each."""

    moved: int
    least: int = 1

    def cut(self, tensors: Lying) -> Cut:
        """Single rows in chunks."""
        return Cut(tensors, 1, 1, [max(self.least, chunk_length(size, self.moved)) for size in tensors.width.tolist()])

    def table(self, cut: Cut) -> Whole:
        """The `CHUNK` words of each chunk."""
        return cut.table(CHUNK, start=cut.words["left"], stop=cut.words["right"])


@dataclass(frozen=True)
class Tiles:
    """Tiles of matrices; a thread takes `pack` elements at a time.

    With `columns`, a tile is as wide as one pack for each of its lanes, at most. With `apart`, it lies in one matrix.
    """

    pack: int
    columns: bool = False
    apart: bool = False

    def lanes(self, width: Whole) -> Whole:
        """The number of threads that share a line of `width` elements."""
        lanes: Whole = 1 << np.arange(6)
        chosen: Whole = lanes[np.minimum(np.searchsorted(lanes, parts(width, self.pack)), 5)]
        return chosen

    def cut(self, tensors: Lying) -> Cut:
        """Matrices in tiles."""
        lanes = self.lanes(tensors.width)
        once = lanes * self.pack
        times = 1 if self.columns else np.maximum(1, np.minimum(parts(tensors.width, once), WIDEST // once))
        across, together = times * once, THREADS // lanes
        full = TILE_SIZE // np.maximum(1, np.minimum(across, tensors.width))
        lines = np.maximum(full, parts(tensors.height, MOST_PIECES))
        down = np.maximum(1, parts(lines, together)) * together
        return Cut(tensors if self.apart else tensors.on_end, 1, down, across)

    def table(self, cut: Cut) -> Whole:
        """The `TILE` words of each tile."""
        words = cut.words
        above = words["first"] * words["height"]
        top, bottom = above + words["top"], above + words["bottom"]
        return cut.table(TILE, matrix=words["first"], top=top, bottom=bottom, lanes=self.lanes(words["width"]))


#: Bytes of a total.
_BYTES = 8


class Slots:
    """The slots and results of a stage's reductions on the device.

    If a row or column lies in a single tile, its total is the result.
    """

    def __init__(self, regions: Sequence[Region], memory: Memory) -> None:
        self._places = Places(regions, direct=True)
        self._slots, results = (memory.empty(max(1, n)) for n in (self._places.slots, self._places.results))
        slots_at, self._results_at = memory.address(self._slots), memory.address(results)
        self._views = self._places.views(results)
        self._starts = [
            np.where(self._joined(region), slots_at + _BYTES * first, self._results_at + _BYTES * to)
            for region, first, to in zip(regions, self._places.first, self._places.to, strict=True)
        ]

    @staticmethod
    def _joined(region: Region) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """The truth, for each tensor, that its results are not its slots."""
        return (region.counts > 1) | (region.shapes is None)

    def addresses(self) -> dict[str, Whole]:
        """The address of each tensor's first slot, by reduction; for whole tensors, of the first slot of all."""
        pairs = zip(self._places.regions, self._starts, strict=True)
        return {r.name: starts[:1] if r.shapes is None else starts for r, starts in pairs}

    def finish(self, fired: Sequence[int]) -> Whole:
        """The work of joining the totals of these tensors: a line of `FINISH` words for each block."""
        chosen = np.asarray(fired, np.int64)
        lines = [self._finish(i, chosen) for i in range(len(self._places.regions))]
        return np.concatenate([np.zeros((0, len(FINISH)), np.int64), *lines])

    def _finish(self, number: int, fired: Whole) -> Whole:
        region, targets = self._places.regions[number], self._places.targets(number, fired)
        sizes, terms = region.sizes[fired], region.counts[fired]
        needed = self._joined(region)[fired] | (terms == 0)
        which, block = counted(np.where(needed, parts(sizes, THREADS), 0))
        done = THREADS * block
        words = {
            "source": self._starts[number][fired[which]] + _BYTES * done,
            "target": self._results_at + _BYTES * (targets[which] + done),
            "count": np.minimum(THREADS, sizes[which] - done), "stride": sizes[which], "terms": terms[which],
            "kind": np.full(len(which), region.code),
        }  # fmt: skip
        return np.stack([words[name] for name in FINISH], axis=1).astype(np.int64)

    def results(self, fired: Sequence[int]) -> dict[str, Any]:
        """The results of these tensors by name, valid until the stage runs again.

        One array with a number for each tensor, or a list of arrays `(batch, rows, 1)` or `(batch, 1, cols)`.
        """
        return chosen(self._views, fired)
