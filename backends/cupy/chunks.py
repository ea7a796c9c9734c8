"""How a bucket is cut for the blocks of a grid: chunks of neighbouring elements, or tiles of matrices.

A chunk or tile lies in one tensor, and follows from that tensor's shape alone: so the bits of a result do not depend on
the other tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .plan import CHUNK, THREADS, TILE

Table = np.ndarray[Any, np.dtype[np.int64]]

#: Elements in a chunk of a small tensor, and of one that has so many chunks that they need not be small. By the bytes
#: that an element moves: the more, the fewer.
CHUNKS = {8: (8192, 32768), 16: (4096, 16384), 64: (2048, 8192)}
#: Elements from which a tensor is no longer small.
LARGE = 1 << 22

#: Elements in a tile, about.
TILE_SIZE = 8192
#: Columns in a tile, where it may have any number of them.
WIDEST = 4096
#: Tiles one above the other in one matrix, at most, where columns are reduced.
MOST_PIECES = 256


class Chunks:
    """The chunks or tiles of a bucket: those of tensor i are the rows `first[i]` to `first[i + 1]` of `table`."""

    def __init__(self, table: Table, first: Sequence[int]) -> None:
        self.table, self.first = table, first

    def of(self, tensors: Iterable[int]) -> Table:
        """The rows of these tensors."""
        ranges = [np.arange(self.first[i], self.first[i + 1]) for i in tensors]
        return np.ascontiguousarray(self.table[np.concatenate(ranges)] if ranges else self.table[:0])


def chunk_length(size: int, moved: int) -> int:
    """Elements in a chunk of a tensor of so many elements, of which each moves so many bytes."""
    small, large = next(lengths for most, lengths in CHUNKS.items() if moved <= most or most == max(CHUNKS))
    return large if size >= LARGE else small


def flat_chunks(sizes: Sequence[int], moved: int) -> Chunks:
    """Chunks of tensors of so many elements."""
    size = np.asarray(sizes, np.int64)
    length = np.array([chunk_length(n, moved) for n in sizes], np.int64)
    count = -(-size // length) if len(sizes) else size
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(count)])
    tensor = np.repeat(np.arange(len(size)), count)
    slot = np.arange(first[-1])
    start = (slot - first[tensor]) * length[tensor]
    stop = np.minimum(start + length[tensor], size[tensor])
    table = np.stack([tensor, start, stop, slot], axis=1).astype(np.int64).reshape(-1, len(CHUNK))
    return Chunks(table, first.tolist())


@dataclass(frozen=True)
class Matrices:
    """A tensor as it lies in memory: `batch` matrices of `height` rows, `width` neighbouring elements each.

    A thread takes `pack` elements at a time. With `columns`, a tile is no wider than a pack of each of its lanes; with
    `apart`, it lies in one matrix.
    """

    batch: int
    height: int
    width: int
    pack: int
    columns: bool = False
    apart: bool = False

    @property
    def lanes(self) -> int:
        """Threads that share a line."""
        needed = -(-self.width // self.pack)
        return min(32, 1 << max(0, needed - 1).bit_length())

    @property
    def across(self) -> int:
        """The columns of a tile."""
        once = self.lanes * self.pack
        times = 1 if self.columns else min(-(-self.width // once), WIDEST // once)
        return max(1, times) * once

    @property
    def down(self) -> int:
        """The lines of a tile."""
        together = THREADS // self.lanes
        lines = max(TILE_SIZE // max(1, min(self.across, self.width)), -(-self.height // MOST_PIECES))
        return max(1, -(-lines // together)) * together

    @property
    def blocks(self) -> int:
        """How many tiles lie side by side in a matrix; 1 where there is nothing to cut."""
        return max(1, -(-self.width // self.across))

    @property
    def pieces(self) -> int:
        """How many tiles lie one above the other in a matrix; 1 where there is nothing to cut."""
        return max(1, -(-self.height // self.down))

    def tiles(self) -> Table:
        """The `TILE` words of each tile, those of the tensor and the slot left at zero."""
        count, height = (self.batch, self.height) if self.apart else (1, self.batch * self.height)
        cuts = [np.arange(count), np.arange(0, height, self.down), np.arange(0, self.width, self.across)]
        matrix, top, left = (x.reshape(-1) for x in np.meshgrid(*cuts, indexing="ij"))
        first, whole = matrix * height, np.ones_like(matrix)
        words = {
            "matrix": matrix, "width": self.width * whole, "top": first + top,
            "bottom": first + np.minimum(top + self.down, height), "left": left,
            "right": np.minimum(left + self.across, self.width), "lanes": self.lanes * whole,
            "row_slots": left // self.across * self.batch * self.height,
            "col_slots": top // self.down * self.batch * self.width,
        }  # fmt: skip
        return np.stack([words.get(name, 0 * whole) for name in TILE], axis=1).astype(np.int64)


def tiles(tensors: Sequence[Matrices]) -> Chunks:
    """Tiles of tensors seen as matrices."""
    found = [tensor.tiles() for tensor in tensors]
    first = np.cumsum([0, *map(len, found)]).tolist()
    table = np.concatenate([np.zeros((0, len(TILE)), np.int64), *found])
    table[:, TILE.index("tensor")] = np.repeat(np.arange(len(tensors)), [*map(len, found)])
    table[:, TILE.index("slot")] = np.arange(len(table))
    return Chunks(table, first)
