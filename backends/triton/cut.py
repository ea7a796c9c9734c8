"""The sizes of chunks for the programs of a grid, and their columns in the table `known`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rulec.kernel.multi_tensor.cut import Cut, Lying, Whole, parts

#: Chunks of one tensor, at most. With more blocks, a program takes several, one after the other, and the table of
#: chunks stays small.
MOST_CHUNKS = 1 << 16
#: Chunks of one tensor, at most, where each writes a slot for another program, or has tiles.
MOST_REDUCED = 1 << 12
#: Where columns are reduced: the least tiles of a chunk, and the most chunks of a matrix, one below the other. The line
#: of slots for each chunk must cost little beside its elements.
LEAST_TILES = 8
MOST_PIECES = 128
#: Where nothing is reduced, so that the cut decides no bits: the chunks of one tensor from which on a chunk may have
#: several tiles, up to `LEAST_TILES`. What a program reads before its first tile must cost little beside its tiles.
ENOUGH_CHUNKS = 1 << 10
#: The same for chunks of blocks, whose programs are smaller.
MANY_CHUNKS = 1 << 13
#: From this many elements of a row on, tiles have one row: places in a tile of several rows would need 64 bits.
WIDEST = 1 << 26


@dataclass(frozen=True)
class Blocks:
    """Chunks of whole blocks of `block` elements; fewer in a stage that `reduces`.

    A chunk has `least` blocks where a tensor has enough chunks, and nothing is reduced.
    """

    block: int
    reduces: bool
    least: int = 1

    def cut(self, tensors: Lying) -> Cut:
        """Single rows in chunks."""
        count = parts(tensors.width, self.block)
        together = _together(count, self.reduces)
        if not self.reduces:
            together = np.maximum(together, np.minimum(self.least, np.maximum(count // MANY_CHUNKS, 1)))
        return Cut(tensors, 1, 1, self.block * together)

    def known(self, cut: Cut) -> list[Whole]:
        """The `FLAT` columns."""
        return [cut.tensors.width, cut.wide // self.block]


@dataclass(frozen=True)
class Tiles:
    """Chunks of tiles one below the other, of one of the `shapes` of `tile_shapes`.

    `columns` is True in a stage with reductions to columns, `reduces` with any reductions.
    """

    shapes: tuple[tuple[int, int, int], ...]
    columns: bool
    reduces: bool

    def cut(self, tensors: Lying) -> Cut:
        """Matrices in chunks."""
        matrices, rows, wide = np.array(self.shapes, np.int64)[self.tile(tensors)].reshape(-1, 3).T
        down = parts(tensors.height, rows)
        count = down * parts(tensors.width, wide) * parts(tensors.batch, matrices)
        depth = _together(count, True)
        if self.columns:
            depth = np.maximum(depth, np.maximum(LEAST_TILES, parts(down, MOST_PIECES)))
        if not self.reduces:
            depth = np.maximum(depth, np.minimum(LEAST_TILES, parts(count, ENOUGH_CHUNKS)))
        return Cut(tensors, matrices, np.minimum(depth, np.maximum(down, 1)) * rows, wide)

    def tile(self, tensors: Lying) -> Whole:
        """The index of each tensor's shape of tiles."""
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
    """The number of blocks in a chunk, for a tensor of `count` blocks."""
    return np.maximum(parts(count, MOST_REDUCED if reduces else MOST_CHUNKS), 1)
