"""How the tensors of a bucket are cut into chunks, one for each program of the grid, and where their reductions go.

How a tensor is cut follows from its own shape alone, so that the bits of a reduction do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rulec.compiler.view import MatrixView
from rulec.kernel.moving import in_memory

Whole = np.ndarray[Any, np.dtype[np.int64]]

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


class Cut:
    """The chunks of some tensors: `counts` says how many each has, `columns` what its line of `known` begins with."""

    def __init__(self, counts: Whole, columns: Whole) -> None:
        self.counts, self.columns = counts, columns

    def chunks(self, tensors: Sequence[int] | Whole) -> np.ndarray[Any, np.dtype[np.int32]]:
        """(tensor, which of its chunks) for every chunk of these tensors, in their order."""
        chosen = np.asarray(tensors, np.int64)
        counts = self.counts[chosen]
        first = np.cumsum(counts) - counts
        number = np.arange(int(counts.sum())) - np.repeat(first, counts)
        return np.stack([np.repeat(chosen, counts), number], axis=1).astype(np.int32)


class FlatCut(Cut):
    """Tensors of so many elements in chunks of whole blocks."""

    def __init__(self, sizes: Sequence[int], block: int, reduces: bool) -> None:
        size = np.asarray(sizes, np.int64)
        blocks = -(-size // block)
        most = MOST_REDUCED if reduces else MOST_CHUNKS
        span = np.maximum(1, -(-blocks // most))
        super().__init__(-(-blocks // span), np.stack([size, span], axis=1))


class ShapedCut(Cut):
    """Tensors seen as matrices, as they lie in memory, in chunks of tiles one below the other.

    `across` and `deep` are how many chunks lie side by side and one below the other in a matrix.
    """

    def __init__(
        self, views: Sequence[MatrixView], transposed: bool, shapes: Sequence[tuple[int, int, int]], columns: bool,
        reduces: bool,
    ) -> None:  # fmt: skip
        """`columns` says that values of columns are reduced, `reduces` that anything is."""
        sizes = [in_memory(view, transposed) for view in views]
        batch, height, width = np.array(sizes, np.int64).reshape(-1, 3).T
        tile = np.array([_tile(*size, shapes) for size in sizes], np.int64)
        matrices, rows, wide = np.array(shapes, np.int64)[tile].reshape(-1, 3).T
        self.across, groups, down = -(-width // wide), -(-batch // matrices), -(-height // rows)
        tiles = self.across * groups * down
        most = MOST_REDUCED if reduces else MOST_CHUNKS
        depth = np.maximum(1, -(-tiles // most))
        if columns:
            depth = np.maximum(depth, np.maximum(LEAST_TILES, -(-down // MOST_PIECES)))
        lines = np.minimum(depth, np.maximum(down, 1)) * rows
        self.deep = -(-height // lines)
        self.batch, self.height, self.width = batch, height, width
        counts = self.across * groups * self.deep
        super().__init__(counts, np.stack([batch, height, width, lines, self.across, self.deep, tile], axis=1))


def _tile(batch: int, height: int, width: int, shapes: Sequence[tuple[int, int, int]]) -> int:
    """Which of the shapes of tiles a tensor is cut into: see `triton_plan.tile_shapes`."""
    wide, narrow, small = shapes[1][2], shapes[2][2], shapes[3][1]
    if (height == 1 and width > wide) or width >= WIDEST:
        return 0
    if width > narrow:
        return 1
    return 3 if batch > 1 and height <= 2 * small else 2
