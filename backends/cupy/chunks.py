"""The lengths of chunks, and the sizes of tiles of matrices, for the blocks of a grid."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rulec.kernel.multi_tensor.cut import Cut, Lying, Whole, parts

from .plan import CHUNK, THREADS, TILE

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
