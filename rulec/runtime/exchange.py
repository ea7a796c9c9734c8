"""Work on whole tensors of which every process has a part: one process, the owner, gets a tensor and does it.

What all launches wait for travels together, in buckets. While an owner works on one bucket, the tensors of the next are
on their way to it, and the results of the one before on their way back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rulec.arrays.library import Library
from rulec.compiler.layout import ITEM_SIZE
from rulec.runtime.owners import Division, Schedule, schedule_of
from rulec.runtime.peers import Meeting, Peers, Pending

#: The bytes of whole tensors, in the dtype they travel in, that one owner gets in a bucket; at least one tensor. Among
#: 64 processes a message then has a mebibyte for each, enough for a network's full rate, and a model of billions of
#: parameters still has many buckets, so that nearly all messages travel behind work.
BUCKET = 1 << 26


@dataclass(frozen=True, eq=False)
class Spread:
    """The processes among which a tensor is divided, and how. Every process that has a part is among them."""

    peers: Peers
    division: Division


@dataclass(frozen=True, eq=False)
class Parcel:
    """The part here of a tensor that is needed whole: its elements in the tensor's order, and the cost of its work."""

    elements: Any
    shape: tuple[int, ...]
    spread: Spread
    cost: float


@dataclass(frozen=True, eq=False)
class Gathering:
    """A wait of a launch for work on whole tensors; it is sent the part here of every result, in its share's shape.

    `work` maps whole tensors to results of the same shapes, by their places among the shares. It gets those that this
    process owns, bucket by bucket. `dtype` is that of the work, which elements are rounded to first, and of its
    results: so they travel in it.
    """

    shares: Sequence[Parcel]
    library: Library
    dtype: str
    work: Callable[[Mapping[int, Any]], Mapping[int, Any]]


def worked(waiting: Sequence[Gathering], meeting: Meeting | None) -> list[list[Any]]:
    """The part here of every result, for each launch."""
    results: list[list[Any]] = [[None] * len(gathering.shares) for gathering in waiting]
    buckets: list[_Bucket] = []
    for (peers, dtype), entries in _by_peers(waiting).items():
        divisions = tuple(entry.share.spread.division for entry in entries)
        costs = tuple(entry.share.cost for entry in entries)
        schedule = schedule_of(divisions, costs, peers.size, BUCKET // ITEM_SIZE[dtype])
        if meeting is not None:
            meeting.exchanged(peers, dtype, schedule)
        for places in schedule.buckets:
            buckets.append(_Bucket(waiting, peers, dtype, schedule, [(i, entries[i]) for i in places]))
    buckets[0].gather()
    before: _Bucket | None = None
    for bucket, after in zip(buckets, [*buckets[1:], None], strict=True):
        bucket.take()
        if after is not None:
            after.gather()
        bucket.work()
        if before is not None:
            before.collect(results)
        bucket.scatter()
        before = bucket
    buckets[-1].collect(results)
    return results


@dataclass(frozen=True, eq=False)
class _Entry:
    """A share, with its launch and its place there."""

    launch: int
    place: int
    share: Parcel


def _by_peers(waiting: Sequence[Gathering]) -> dict[tuple[Peers, str], list[_Entry]]:
    """The shares by the processes that exchange them, and the dtype they travel in."""
    by_peers: dict[tuple[Peers, str], list[_Entry]] = {}
    for launch, gathering in enumerate(waiting):
        for place, share in enumerate(gathering.shares):
            by_peers.setdefault((share.spread.peers, gathering.dtype), []).append(_Entry(launch, place, share))
    return by_peers


class _Bucket:
    """The tensors that travel together, on their way there and back."""

    def __init__(
        self, waiting: Sequence[Gathering], peers: Peers, dtype: str, schedule: Schedule,
        entries: Sequence[tuple[int, _Entry]],
    ) -> None:  # fmt: skip
        self.waiting, self.peers, self.dtype, self.schedule = waiting, peers, dtype, schedule
        first = entries[0][1]
        self.library, self.like = waiting[first.launch].library, first.share.elements
        #: The tensors of each owner.
        self.of_rank: list[list[tuple[int, _Entry]]] = [[] for _ in range(peers.size)]
        for i, entry in entries:
            self.of_rank[schedule.owners[i]].append((i, entry))
        self.mine = self.of_rank[peers.rank]
        self.pending: Pending | None = None
        self.wholes: dict[int, dict[int, Any]] = {}

    def gather(self) -> None:
        """Begins to send every owner the parts that are sent from here."""
        here, senders = self.peers.rank, self.schedule.senders
        sent = [[e.share.elements.reshape(-1) for i, e in theirs if here in senders[i]] for theirs in self.of_rank]
        self.pending = self._begun(sent, self._counts_there())

    def take(self) -> None:
        """Puts the tensors owned here together."""
        parts = self._arrived(self._counts_there())
        for i, entry in self.mine:
            whole = self.library.blank(entry.share.elements, entry.share.shape)
            for rank in sorted(self.schedule.senders[i]):
                rectangle = entry.share.spread.division.rectangles[rank]
                whole[rectangle] = next(parts[rank]).reshape([side.stop - side.start for side in rectangle])
            self.wholes.setdefault(entry.launch, {})[entry.place] = whole

    def work(self) -> None:
        """Does the work on the tensors owned here."""
        for launch in [*self.wholes]:
            self.wholes[launch] = dict(self.waiting[launch].work(self.wholes[launch]))

    def scatter(self) -> None:
        """Begins to send every process its parts of the results."""
        sent = [
            [self.wholes[e.launch][e.place][e.share.spread.division.rectangles[rank]].reshape(-1) for _, e in self.mine]
            for rank in range(self.peers.size)
        ]
        self.wholes = {}
        self.pending = self._begun(sent, self._counts_back())

    def collect(self, results: Sequence[list[Any]]) -> None:
        """Puts the part here of every result in its place."""
        parts = self._arrived(self._counts_back())
        for theirs, received in zip(self.of_rank, parts, strict=True):
            for _, entry in theirs:
                results[entry.launch][entry.place] = next(received).reshape(entry.share.elements.shape)

    def _counts_there(self) -> list[list[int]]:
        """The elements of each part that comes from each process on the way there."""
        return [
            [int(e.share.spread.division.counts[rank]) for i, e in self.mine if rank in self.schedule.senders[i]]
            for rank in range(self.peers.size)
        ]

    def _counts_back(self) -> list[list[int]]:
        """The elements of each result's part that comes from each process on the way back."""
        here = self.peers.rank
        return [[int(e.share.spread.division.counts[here]) for _, e in theirs] for theirs in self.of_rank]

    def _begun(self, sent: Sequence[Sequence[Any]], counts: Sequence[Sequence[int]]) -> Pending:
        """Begins to send each process its vectors, and to take so many elements from each."""
        vectors = [vector for theirs in sent for vector in theirs] or [self.library.blank(self.like, (0,))]
        message = self.library.join(vectors, 0)
        shares = [sum(len(vector) for vector in theirs) for theirs in sent]
        return self.peers.exchange(message, shares, [sum(each) for each in counts], self.dtype)

    def _arrived(self, counts: Sequence[Sequence[int]]) -> list[Any]:
        """The vectors of each process, of so many elements, once they are here."""
        assert self.pending is not None
        received, begin = self.pending.wait(), 0
        self.pending = None
        parts: list[Any] = []
        for each in counts:
            parts.append(iter([received[begin : (begin := begin + count)] for count in each]))
        return parts
