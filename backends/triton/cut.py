"""How large the chunks of tensors are that the programs of a grid take, and what a program is told of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rulec.kernel.bucket.cut import Cut, Lying, Whole, parts

#: Chunks of one tensor, at most: where there are more blocks, a program takes several, one after the other, and the
#: table of chunks stays small.
MOST_CHUNKS = 1 << 16
#: The same where each chunk leaves a slot that another program must read.
MOST_REDUCED = 1 << 12
#: Tiles one below the other that a chunk has at least where columns are reduced, and chunks one below the other at
#: most: a line of slots for each must cost little beside its elements.
LEAST_TILES = 8
MOST_PIECES = 128
#: Elements of a row from which on tiles have one row: the places in a tile of more must not need 64 bits.
WIDEST = 1 << 26


@dataclass(frozen=True)
class Blocks:
    """Chunks of whole blocks of so many elements; of a stage that `reduces` there are fewer."""

    block: int
    reduces: bool

    def cut(self, tensors: Lying) -> Cut:
        """Single rows in chunks."""
        return Cut(tensors, 1, 1, self.block * _together(parts(tensors.width, self.block), self.reduces))

    def known(self, cut: Cut) -> list[Whole]:
        """The `FLAT` columns."""
        return [cut.tensors.width, cut.wide // self.block]


@dataclass(frozen=True)
class Tiles:
    """Chunks of tiles one below the other, of one of the `shapes` that `tile_shapes` gives.

    `columns` says that values of columns are reduced, `reduces` that anything is.
    """

    shapes: tuple[tuple[int, int, int], ...]
    columns: bool
    reduces: bool

    def cut(self, tensors: Lying) -> Cut:
        """Matrices in chunks."""
        matrices, rows, wide = np.array(self.shapes, np.int64)[self.tile(tensors)].reshape(-1, 3).T
        down = parts(tensors.height, rows)
        depth = _together(down * parts(tensors.width, wide) * parts(tensors.batch, matrices), self.reduces)
        if self.columns:
            depth = np.maximum(depth, np.maximum(LEAST_TILES, parts(down, MOST_PIECES)))
        return Cut(tensors, matrices, np.minimum(depth, np.maximum(down, 1)) * rows, wide)

    def tile(self, tensors: Lying) -> Whole:
        """Which of the shapes each tensor is cut into."""
        batch, height, width = tensors.batch, tensors.height, tensors.width
        wide, narrow, small = self.shapes[1][2], self.shapes[2][2], self.shapes[3][1]
        long = ((height == 1) & (width > wide)) | (width >= WIDEST)
        small_ones = (batch > 1) & (height <= 2 * small)
        tile: Whole = np.select([long, width > narrow, small_ones], [0, 1, 3], 2)
        return tile

    def known(self, cut: Cut) -> list[Whole]:
        """The `SHAPED` columns."""
        tensors = cut.tensors
        return [
            tensors.batch, tensors.height, tensors.width, cut.lines, cut.across, cut.deep, self.tile(tensors),
        ]  # fmt: skip


def _together(count: Whole, reduces: bool) -> Whole:
    """How many of so many blocks a chunk has."""
    return np.maximum(parts(count, MOST_REDUCED if reduces else MOST_CHUNKS), 1)
