"""Matrices that several owners orthogonalize together: each has some columns of a matrix along its longest side.

The Gram matrix of the rows is the sum of those of the pieces. Every owner adds up some of its rows and rounds them,
computes the same rows of the polynomial, and gives both to the others, so all have the same bits of them. The next
matrix follows piece by piece. Matrices of one bucket go together, so their messages are as many as those of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rulec.language.schedules import coefficients_of
from rulec.runtime.peers import Peers
from rulec.runtime.share import Share


class Quintic(Protocol):
    """What an owner computes, on pieces `(rows, cols)` as arrays of any kind."""

    def begin(self, x: Any) -> Any: ...
    def end(self, y: Any, like: Any) -> Any: ...
    def nothing(self, like: Any) -> Any: ...
    def join(self, parts: Sequence[Any]) -> Any: ...
    def squares(self, y: Any) -> Any: ...
    def divided(self, y: Any, squares: Any) -> Any: ...
    def gram(self, y: Any) -> Any: ...
    def added(self, sums: Sequence[Any]) -> Any: ...
    def polynomial(self, rows: Any, gram: Any, b: float, c: float) -> Any: ...
    def following(self, y: Any, polynomial: Any, a: float) -> Any: ...


@dataclass(frozen=True, eq=False)
class MatrixPiece:
    """The piece of a matrix here, `(rows, cols)` with the longer side of the matrix as columns.

    `first` is the first of its owners, who follow one another.
    """

    share: Share
    first: int
    elements: Any

    @property
    def team(self) -> range:
        """The owners of the matrix."""
        return range(self.first, self.first + self.share.count)


class Team:
    """The owners among `peers` of matrices with equal steps and dtype, and their pieces here, in one order for all.

    Every process takes part in all exchanges, with or without pieces.
    """

    def __init__(self, peers: Peers, quintic: Quintic, pieces: Sequence[MatrixPiece], like: Any) -> None:
        self.peers, self.quintic, self.pieces, self._like = peers, quintic, pieces, like

    def orthogonalized(self, like: Share) -> list[Any]:
        """The results for the pieces here; `like` is the share of any matrix."""
        quintic, pieces, dtype = self.quintic, self.pieces, like.dtype
        each = [quintic.begin(piece.elements) for piece in pieces]
        squares = self._swapped([[quintic.squares(y)] * p.share.count for p, y in zip(pieces, each, strict=True)],
                                [[1] * p.share.count for p in pieces], "float64")  # fmt: skip
        each = [quintic.divided(y, sum(parts)) for y, parts in zip(each, squares, strict=True)]
        for a, b, c in coefficients_of(like.coefficients, like.steps):
            grams = self._grams([quintic.gram(y) for y in each], like.wide, dtype)
            mine = [x[p.share.block(p.share.place)] for p, x in zip(pieces, grams, strict=True)]
            rows = [quintic.polynomial(block, gram, b, c) for block, gram in zip(mine, grams, strict=True)]
            each = [quintic.following(y, x, a) for y, x in zip(each, self._gathered(rows, dtype), strict=True)]
        return [quintic.end(y, p.elements) for p, y in zip(pieces, each, strict=True)]

    def _grams(self, sums: Sequence[Any], wide: str, dtype: str) -> list[Any]:
        """The Gram matrices of whole matrices, from those of the pieces here."""
        pieces = self.pieces
        sent = [[x[p.share.block(k)] for k in range(p.share.count)] for p, x in zip(pieces, sums, strict=True)]
        counts = [[p.share.rows * _length(p.share, p.share.place)] * p.share.count for p in pieces]
        parts = self._swapped(sent, counts, wide)
        return self._gathered([self.quintic.added(blocks) for blocks in parts], dtype)

    def _gathered(self, rows: Sequence[Any], dtype: str) -> list[Any]:
        """Whole matrices, from the rows that each owner has."""
        counts = [[p.share.rows * _length(p.share, k) for k in range(p.share.count)] for p in self.pieces]
        sent = [[x] * p.share.count for p, x in zip(self.pieces, rows, strict=True)]
        return [self.quintic.join(blocks) for blocks in self._swapped(sent, counts, dtype)]

    def _swapped(self, sent: Sequence[Sequence[Any]], counts: Sequence[Sequence[int]], dtype: str) -> list[list[Any]]:
        """The blocks of each matrix from all its owners, for the blocks `sent` to each of them.

        `counts` are the elements that come from each. Blocks of matrices come with all columns.
        """
        here, size = self.peers.rank, self.peers.size
        ways: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        for n, piece in enumerate(self.pieces):
            for k, rank in enumerate(piece.team):
                if rank != here:
                    ways[rank].append((n, k))
        vectors = [[sent[n][k].reshape(-1) for n, k in way] for way in ways]
        message = self.quintic.join([x for each in vectors for x in each] or [self.quintic.nothing(self._like)])
        received = self.peers.exchange(
            message,
            [sum(map(len, each)) for each in vectors],
            [sum(counts[n][k] for n, k in way) for way in ways],
            dtype,
        ).wait()
        results, begin = [[*blocks] for blocks in sent], 0
        for n, k in (pair for way in ways for pair in way):
            block = received[begin : (begin := begin + counts[n][k])]
            mine = sent[n][self.pieces[n].share.place]
            results[n][k] = block.reshape(-1, *mine.shape[1:])
        return results


def _length(share: Share, place: int) -> int:
    block = share.block(place)
    length: int = block.stop - block.start
    return length
