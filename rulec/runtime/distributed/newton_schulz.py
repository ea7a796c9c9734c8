"""Newton-Schulz split over several owner ranks: each has some columns of a matrix along its longer side.

The Gram matrix of the rows is the sum of the Gram matrices of the pieces. Every owner adds up some of its rows and
rounds them, and computes the same rows of the polynomial. It sends both to the other owners, so all have the same bits
of them. The next matrix follows piece by piece. In the `gram` form only the Gram matrix is sent, from which every owner
computes the matrix of two iterations. All matrices of a bucket share their messages. An owner that fails goes on to
send messages with placeholder data, for the other owners wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from rulec.language.expr.newton_schulz import Coefficients
from rulec.runtime.distributed.owners import Share
from rulec.runtime.distributed.process_group import RankGroup

Result = TypeVar("Result")


class Attempt(Protocol):
    """Calls work in a rank that may fail, and returns None where the rank fails now or has failed before."""

    def __call__(self, work: Callable[[], Result]) -> Result | None: ...


class Quintic(Protocol):
    """The operations of an owner on pieces `(rows, cols)`, as arrays of any kind."""

    def begin(self, x: Any) -> Any: ...
    def end(self, y: Any, like: Any) -> Any: ...
    def blank(self, like: Any, count: int) -> Any: ...
    def join(self, parts: Sequence[Any]) -> Any: ...
    def squares(self, y: Any) -> Any: ...
    def divided(self, y: Any, squares: Any, normalize: str | float) -> Any: ...
    def gram(self, y: Any) -> Any: ...
    def added(self, sums: Sequence[Any]) -> Any: ...
    def polynomial(self, rows: Any, gram: Any, b: float, c: float) -> Any: ...
    def factor(self, gram: Any, block: Coefficients) -> tuple[Any, float]: ...
    def following(self, y: Any, polynomial: Any, a: float) -> Any: ...


@dataclass(frozen=True, eq=False)
class MatrixPiece:
    """This rank's piece of a matrix, `(rows, cols)` with the longer side of the matrix as columns.

    `first` is the first of its owners, which are consecutive ranks.
    """

    share: Share
    first: int
    elements: Any

    @property
    def team(self) -> range:
        """The owner ranks of the matrix."""
        return range(self.first, self.first + self.share.count)


class SplitNewtonSchulz:
    """Newton-Schulz of matrices with equal steps and dtype, split over owner ranks among `rank_group`.

    `pieces` are the local pieces, in the same order in all ranks. Every rank takes part in all all-to-alls: with or
    without pieces, and where its work, called by `attempt`, has failed.
    """

    def __init__(
        self, rank_group: RankGroup, quintic: Quintic, pieces: Sequence[MatrixPiece], like: Any, attempt: Attempt
    ) -> None:  # fmt: skip
        self.rank_group, self.quintic, self.pieces = rank_group, quintic, pieces
        self._like, self._attempt = like, attempt

    def orthogonalized(self, like: Share) -> list[Any] | None:
        """The results for the local pieces, or None after a failure; `like` is the share of any matrix."""
        quintic, pieces, dtype = self.quintic, self.pieces, like.iterated
        ones = [[1] * p.share.count for p in pieces]
        each = self._attempt(lambda: [quintic.begin(piece.elements) for piece in pieces])
        squares = self._swapped(lambda: [[quintic.squares(y)] * p.share.count for p, y in self._with(each)],
                                ones, ones, "float64")  # fmt: skip
        each = self._attempt(partial(self._divided, each, squares, like.normalize))
        for block in like.blocks:
            grams = self._grams(each, like.wide, dtype)
            each = self._attempt(partial(self._following, each, self._factors(grams, block, dtype)))
        return self._attempt(partial(self._ended, each))

    def _with(self, values: Sequence[Any] | None) -> list[tuple[MatrixPiece, Any]]:
        """Pairs of a piece and its value."""
        return [*zip(self.pieces, values or (), strict=True)]

    def _divided(self, each: Sequence[Any] | None, squares: Sequence[Any] | None, by: str | float) -> list[Any]:
        return [self.quintic.divided(y, sum(parts), by) for y, parts in zip(each or (), squares or (), strict=True)]

    def _polynomials(self, grams: Sequence[Any] | None, b: float, c: float) -> list[Any]:
        """The rows of each polynomial that this rank computes."""
        return [self.quintic.polynomial(x[p.share.block(p.share.place)], x, b, c) for p, x in self._with(grams)]

    def _factors(self, grams: Sequence[Any] | None, block: Coefficients, dtype: str) -> list[tuple[Any, float]] | None:
        """The matrix of each piece's next iterations, and the share of the piece itself.

        Of one iteration every owner computes some rows, and of several each computes all.
        """
        if len(block) > 1:
            return self._attempt(lambda: [self.quintic.factor(x, block) for x in grams or ()])
        ((a, b, c),) = block
        polynomials = self._gathered(partial(self._polynomials, grams, b, c), dtype)
        return None if polynomials is None else [(x, a) for x in polynomials]

    def _following(self, each: Sequence[Any] | None, factors: Sequence[tuple[Any, float]] | None) -> list[Any]:
        return [self.quintic.following(y, x, a) for y, (x, a) in zip(each or (), factors or (), strict=True)]

    def _ended(self, each: Sequence[Any] | None) -> list[Any]:
        return [self.quintic.end(y, p.elements) for p, y in self._with(each)]

    def _grams(self, each: Sequence[Any] | None, wide: str, dtype: str) -> list[Any] | None:
        """The Gram matrices of global matrices, from the local pieces."""
        counts = [[_size(p.share, k) for k in range(p.share.count)] for p in self.pieces]
        mine = [[_size(p.share, p.share.place)] * p.share.count for p in self.pieces]
        parts = self._swapped(partial(self._blocks, each), counts, mine, wide)
        return self._gathered(lambda: [self.quintic.added(blocks) for blocks in parts or ()], dtype)

    def _blocks(self, each: Sequence[Any] | None) -> list[list[Any]]:
        """The sums for each owner of each matrix, over the local pieces."""
        sums = [(p.share, self.quintic.gram(y)) for p, y in self._with(each)]
        return [[x[share.block(k)] for k in range(share.count)] for share, x in sums]

    def _gathered(self, rows: Callable[[], Sequence[Any]], dtype: str) -> list[Any] | None:
        """All-gathers matrices from the rows that each owner has."""
        counts = [[_size(p.share, k) for k in range(p.share.count)] for p in self.pieces]
        mine = [[_size(p.share, p.share.place)] * p.share.count for p in self.pieces]
        blocks = self._swapped(lambda: [[x] * p.share.count for p, x in self._with(rows())], mine, counts, dtype)
        return self._attempt(lambda: [self.quintic.join(each) for each in blocks or ()])

    def _swapped(
        self, make: Callable[[], Sequence[Sequence[Any]]], out: Sequence[Sequence[int]],
        counts: Sequence[Sequence[int]], dtype: str,
    ) -> list[list[Any]] | None:  # fmt: skip
        """Exchanges blocks between the owners of each matrix: sends one to each owner, and returns those of all owners.

        `out` are the send counts for each owner, and `counts` the receive counts. Blocks of matrices arrive with all
        columns.
        """
        here, size = self.rank_group.rank, self.rank_group.size
        ways: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        for n, piece in enumerate(self.pieces):
            for k, rank in enumerate(piece.team):
                if rank != here:
                    ways[rank].append((n, k))
        shares, lengths = ([sum(each[n][k] for n, k in way) for way in ways] for each in (out, counts))
        sent = self._attempt(make)
        message = self._attempt(partial(self._message, sent, ways))
        if message is None:
            message = self.quintic.blank(self._like, sum(shares))
        pending = self.rank_group.exchange(message, shares, lengths, dtype)
        pending.wait()
        pairs = [pair for way in ways for pair in way]
        return self._attempt(lambda: self._with_blocks(sent or (), pairs, counts, pending.received()))

    def _message(self, sent: Any, ways: Sequence[Sequence[tuple[int, int]]]) -> Any:
        vectors = [sent[n][k].reshape(-1) for way in ways for n, k in way]
        return self.quintic.join(vectors or [self.quintic.blank(self._like, 0)])

    def _with_blocks(
        self, sent: Sequence[Sequence[Any]], pairs: Sequence[tuple[int, int]], counts: Any, received: Any
    ) -> list[list[Any]]:  # fmt: skip
        """The received blocks, and the blocks that this rank keeps."""
        results, begin = [[*blocks] for blocks in sent], 0
        for n, k in pairs:
            block = received[begin : (begin := begin + counts[n][k])]
            mine = sent[n][self.pieces[n].share.place]
            results[n][k] = block.reshape(-1, *mine.shape[1:])
        return results


def _size(share: Share, place: int) -> int:
    """The elements in the rows of an owner."""
    block = share.block(place)
    size: int = share.rows * (block.stop - block.start)
    return size
