"""The products of `newton_schulz` by kind: their tiles, and how many matrices go into a stack."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .product import Tile

#: So many processors need one tile of a matrix among them: a stack has several matrices.
_SHARED = 4


@dataclass(frozen=True, eq=False)
class Kind:
    """A product of matrices of one shape: `height` by `width`, of sums of `depth` terms. There is one object of each.

    Terms of the factors that are `down` lie down their columns. Of a symmetric product one `half` is computed. What
    `adds` is added to a matrix.
    """

    height: int
    width: int
    depth: int
    down: tuple[bool, bool]
    half: bool
    adds: bool

    def count(self, tile: Tile) -> int:
        """The number of tiles of a matrix."""
        return count_half(tile, self.height) if self.half else tile.count(self.height, self.width)

    def tile(self, tiles: Sequence[Tile], processors: int) -> Tile:
        """The largest tile of which a matrix has enough for the processors, else the smallest."""
        fitting = [tile for tile in tiles if tile.high == tile.wide or not self.half]
        enough = (tile for tile in fitting if self.count(tile) * _SHARED >= processors)
        return tuned(next(enough, fitting[-1]), self.half, self.adds)


def tuned(tile: Tile, half: bool, adds: bool) -> Tile:
    """The tile with the stages that a kind of product was fastest with on an H200, where it has descriptors.

    A processor has no room for two such tiles. Products that are written twice want four stages.
    """
    whole = tile.described and adds and not half
    return replace(tile, stages=min(tile.stages, 3)) if whole else tile


def count_half(tile: Tile, side: int) -> int:
    """The number of square tiles on and below the diagonal."""
    across = -(-side // tile.high)
    return across * (across + 1) // 2


@functools.cache
def gram_kind(rows: int, cols: int) -> Kind:
    """The product of a matrix and its transpose, with the shorter side twice."""
    side, down = min(rows, cols), rows > cols
    return Kind(side, side, max(rows, cols), (down, down), half=True, adds=False)


@functools.cache
def polynomial_kind(side: int) -> Kind:
    """The square of a symmetric matrix, and the matrix."""
    return Kind(side, side, side, (False, False), half=True, adds=True)


@functools.cache
def following_kind(rows: int, cols: int) -> Kind:
    """The product of a matrix and a symmetric one of its shorter side, and the matrix."""
    return Kind(rows, cols, min(rows, cols), (False, True), half=False, adds=True)


def kinds(rows: int, cols: int) -> tuple[Kind, Kind, Kind]:
    """The products of an iteration."""
    return gram_kind(rows, cols), polynomial_kind(min(rows, cols)), following_kind(rows, cols)


def fill(kind: Kind, tile: Tile, processors: int, stack: int) -> float:
    """The share of processors with a tile, over all waves of a launch."""
    count = stack * kind.count(tile)
    return count / (_waves(count, processors) * processors)


def stack_size(rows: int, cols: int, count: int, most: int, tiles: Sequence[Tile], processors: int) -> int:
    """How many of `count` matrices go into a stack, `most` or fewer: as many as take the least time in all.

    In a wave each processor computes one tile, so a stack takes as long as a whole number of waves.
    """
    chosen = [(kind, kind.tile(tiles, processors)) for kind in kinds(rows, cols)]
    works = [(kind.count(tile), tile.high * tile.wide * kind.depth) for kind, tile in chosen]

    def time(stack: int) -> int:
        return sum(_waves(stack * tiles_of_one, processors) * terms for tiles_of_one, terms in works)

    def whole(stack: int) -> int:
        return count // stack * time(stack) + time(count % stack)

    sizes = range(max(1, min(count, most)), 0, -1)
    return min(sizes, key=whole)


def _waves(count: int, processors: int) -> int:
    return -(-count // processors)
