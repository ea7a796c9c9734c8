"""All-to-all between ranks: shards travel to the owner rank of a global tensor, and shards of the results come back.

The owner of a tensor gets all its shards, works on the global tensor, and sends each rank the shard of the result.
Several arrays may travel for one tensor: gradients, states of shapes of their own, vectors, numbers. The payloads of
all waiting launches travel together, in buckets. While an owner works on one bucket, the arrays of the next bucket
travel to it, and the results of the bucket before travel back.

Used by `rulec.runtime.stages.step`; `owners` chooses owners and buckets, `owner_plan` the values that owners compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from rulec.array_api.library import Library
from rulec.runtime.distributed.newton_schulz import MatrixPiece, SplitNewtonSchulz
from rulec.runtime.distributed.owners import Division, Load, Schedule, Share, Work, assignment, schedule_of, share_pays
from rulec.runtime.distributed.process_group import DeferredError, Pending, RankGroup, StepCoordinator

#: The bytes of global arrays, in the dtypes they travel in, that one owner gets in a bucket; at least those of one
#: tensor. Among 64 ranks a message then has a mebibyte for each, enough for a network's full rate. A model of billions
#: of parameters still has many buckets, so that nearly all messages overlap with work.
BUCKET = 1 << 26


@dataclass(frozen=True, eq=False)
class Sharding:
    """The sharding of a tensor: the rank group of all its shards, and the division of the tensor over these ranks.

    `coordinates` has, for each rank, its index along every cut of the tensor and the number of shards along it. If
    there are replicas, `alone` is the sharding among the ranks of this rank's replica.
    """

    rank_group: RankGroup
    division: Division
    coordinates: tuple[tuple[tuple[int, int], ...], ...]
    alone: Sharding | None = None

    def divided(self, shape: tuple[int, ...]) -> Division:
        """The division over ranks of an array of another shape: its longest side is cut as torch cuts a dimension."""
        axis = longest(shape)
        rectangles = []
        for places in self.coordinates:
            start, stop = 0, shape[axis]
            for place, count in places:
                size = -(-(stop - start) // count)
                start, stop = min(start + place * size, stop), min(start + (place + 1) * size, stop)
            sides = [slice(0, n) for n in shape]
            sides[axis] = slice(start, stop)
            rectangles.append(tuple(sides))
        return Division(tuple(rectangles))


@dataclass(eq=False)
class Task:
    """The work of owner ranks on one global tensor: of the rank `owner`, or of several `owners` of pieces.

    `spread` is the sharding over all replicas until owners are chosen, and afterwards over the ranks that take part in
    the work. `name` is the tensor's name, for errors.
    """

    spread: Sharding
    work: Work
    owners: tuple[int, ...] = (0,)
    name: str = ""

    @property
    def owner(self) -> int:
        """The owner rank, the first of several."""
        return self.owners[0]

    @property
    def here(self) -> bool:
        """Whether this rank is the only owner."""
        return self.owners == (self.spread.rank_group.rank,)


@dataclass(frozen=True, eq=False)
class Payload:
    """The payload of an all-to-all: an array on its way to the owner of a tensor, or a result on its way back.

    `shape` is the array's global shape. `elements` are the local shard of an array on its way to the owner, in the
    dtype `computed`; they are rounded to `dtype` and travel in it.
    """

    division: Division
    shape: tuple[int, ...]
    dtype: str
    computed: str
    elements: Any = None

    def piece(self, axis: int, start: int, stop: int, rank: int) -> Payload:
        """The payload of the elements from `start` to `stop` along an axis, for this rank."""
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        elements = self.elements
        if elements is not None:
            here = self.division.rectangles[rank][axis]
            inside = slice(max(start - here.start, 0), max(stop - here.start, 0))
            elements = elements[(slice(None),) * axis + (inside,)]
        return Payload(self.division.piece(axis, start, stop), shape, self.dtype, self.computed, elements)


@dataclass(frozen=True, eq=False)
class Transfer:
    """The payloads of a task in one all-to-all: `there` to the owner, and `back` from it.

    If several owners work on the task, it is `newton_schulz` of one matrix; `share` has its numbers, and `axis` is
    the dimension along which owners have pieces.
    """

    task: Task
    there: Sequence[Payload]
    back: Sequence[Payload]
    share: Share | None = None
    axis: int = 0

    @cached_property
    def load(self) -> Load:
        """The divisions and dtypes of the payloads."""
        there, back = ([(x.division, x.dtype) for x in payloads] for payloads in (self.there, self.back))
        return Load(tuple(there), tuple(back), self.share)

    def pieces(self) -> list[Transfer]:
        """The transfer of each owner's piece."""
        owners, spread, work = self.task.owners, self.task.spread, self.task.work
        count, rank = len(owners), spread.rank_group.rank
        if count == 1 or self.share is None:
            return [self]
        part = Work(work.cost / count)
        bounds = cuts(self.there[0].shape[self.axis], count)
        return [
            Transfer(
                Task(spread, part, (owner,), self.task.name),
                [x.piece(self.axis, *bounds[k], rank) for x in self.there],
                [x.piece(self.axis, *bounds[k], rank) for x in self.back], replace(self.share, place=k, count=count),
                self.axis,
            )
            for k, owner in enumerate(owners)
        ]  # fmt: skip


@dataclass(frozen=True, eq=False)
class OwnerRequest:
    """Yielded to ask for owner ranks; the scheduler sets `task.owners` and resumes with None."""

    tasks: Sequence[Task]


@dataclass(frozen=True, eq=False)
class OwnerExchange:
    """Yielded to have owner ranks work on global tensors; the scheduler resumes with the local shards of the results.

    `work` maps arrays of global tensors to results, both in the order of the payloads, by the indices of the tensors in
    `transfers`, the transfers. It is called with the tensors that this rank owns, bucket by bucket.
    """

    transfers: Sequence[Transfer]
    library: Library
    work: Callable[[Mapping[int, Sequence[Any]]], Mapping[int, Sequence[Any]]]


def longest(shape: Sequence[int]) -> int:
    """The longest dimension of a shape; the first of several."""
    return [*shape].index(max(shape))


def assign(waiting: Sequence[OwnerRequest], coordinator: StepCoordinator | None) -> None:
    """Chooses the owner ranks of all tasks together."""
    by_group: dict[RankGroup, list[Task]] = {}
    for task in (task for wait in waiting for task in wait.tasks):
        by_group.setdefault(task.spread.rank_group, []).append(task)
    for rank_group, tasks in by_group.items():
        works = tuple(task.work for task in tasks)
        chosen = assignment(works, rank_group.size, tuple(task.spread.division for task in tasks))
        alone = [task.spread.alone for task in tasks if task.spread.alone is not None]
        if len(alone) == len(tasks) and len({spread.rank_group for spread in alone}) == 1:
            few = assignment(works, alone[0].rank_group.size, tuple(spread.division for spread in alone))
            if not share_pays(chosen, few, rank_group.size):
                rank_group, chosen = alone[0].rank_group, few
                for task, spread in zip(tasks, alone, strict=True):
                    task.spread = spread
        for task, owners in zip(tasks, chosen.owners, strict=True):
            task.owners = owners
        if coordinator is not None:
            coordinator.assigned(rank_group, works, chosen)


def cuts(side: int, count: int) -> list[tuple[int, int]]:
    """The begin and end of each of `count` parts of a side, as equal as they can be."""
    return [(side * k // count, side * (k + 1) // count) for k in range(count)]


def worked(waiting: Sequence[OwnerExchange], coordinator: StepCoordinator) -> list[list[list[Any]]]:
    """Runs the all-to-alls of waiting launches, and returns the local shards of each tensor's results, for each launch.

    If this rank fails in its work, it sends placeholder data, and its error is kept in `coordinator.failure`.
    RulecError, in all ranks, where one has failed before.
    """
    failure = coordinator.failure
    results: list[list[list[Any]]] = [[[None] * len(c.back) for c in wait.transfers] for wait in waiting]
    buckets: list[_Bucket] = []
    for rank_group, entries in _by_group(waiting).items():
        loads, owners = tuple(e.transfer.load for e in entries), tuple(e.transfer.task.owner for e in entries)
        schedule = schedule_of(loads, owners, rank_group.size, BUCKET)
        coordinator.exchanged(rank_group, schedule)
        for places in schedule.buckets:
            buckets.append(_Bucket(waiting, rank_group, schedule, [(i, entries[i]) for i in places], failure))
    coordinator.check()
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
    failure.turn += 1
    return results


@dataclass(frozen=True, eq=False)
class _Entry:
    """The transfer of one tensor, or of a piece of it, with its launch and its index in that launch."""

    launch: int
    place: int
    transfer: Transfer


def _by_group(waiting: Sequence[OwnerExchange]) -> dict[RankGroup, list[_Entry]]:
    """The transfers by rank group, the longest work first."""
    by_group: dict[RankGroup, list[_Entry]] = {}
    for launch, exchange in enumerate(waiting):
        for place, transfer in enumerate(exchange.transfers):
            entries = [_Entry(launch, place, piece) for piece in transfer.pieces()]
            by_group.setdefault(transfer.task.spread.rank_group, []).extend(entries)
    return {
        rank_group: sorted(entries, key=lambda e: -e.transfer.task.work.cost)
        for rank_group, entries in by_group.items()
    }


#: An array in a message: the index of its tensor in the schedule, its index among the payloads, and the payload.
_Item = tuple[int, int, _Entry, Payload]

#: The dtypes of a message: of elements on their way, and of elements on both ends.
_Dtypes = tuple[str, str]


class _Bucket:
    """The tensors of one all-to-all to their owners and one back: a message for each dtype."""

    def __init__(
        self, waiting: Sequence[OwnerExchange], rank_group: RankGroup, schedule: Schedule,
        entries: Sequence[tuple[int, _Entry]], failure: DeferredError,
    ) -> None:  # fmt: skip
        self.failure = failure
        self.waiting, self.rank_group, self.schedule = waiting, rank_group, schedule
        self.library = waiting[entries[0][1].launch].library
        self._there = _by_owner(
            [(i, k, e, x) for i, e in entries for k, x in enumerate(e.transfer.there)], rank_group.size
        )
        self._back = _by_owner(
            [(i, k, e, x) for i, e in entries for k, x in enumerate(e.transfer.back)], rank_group.size
        )
        self._mine = [e for _, e in entries if e.transfer.task.here]
        #: Matrices with several owners are orthogonalized together where these numbers are equal.
        self._kinds = {e.transfer.share.kind: e.transfer.share for _, e in entries if e.transfer.share is not None}
        self._pending: dict[_Dtypes, Pending] = {}
        #: Arrays of the tensors that this rank owns, and then their results, by launch and tensor.
        self.wholes: dict[int, dict[int, Any]] = {}

    def gather(self) -> None:
        """Begins to send every owner the local shards that this rank sends."""
        self.failure.turn += 1
        here = self.rank_group.rank
        for dtypes, of_rank in self._there.items():
            sent = [[x for i, k, _, x in theirs if self._sends(here, i, k)] for theirs in of_rank]
            shares = [sum(int(x.division.counts[here]) for x in theirs) for theirs in sent]
            self._begin(dtypes, partial(_elements, sent), shares, self._counts_there(of_rank))

    def take(self) -> None:
        """Assembles the global arrays of the tensors that this rank owns."""
        self.failure.turn += 1
        for e in self._mine:
            self.wholes.setdefault(e.launch, {})[e.place] = [None] * len(e.transfer.there)
        for dtypes, of_rank in self._there.items():
            self._arrived(dtypes, self._counts_there(of_rank), partial(self._put_together, dtypes, of_rank))

    def _put_together(self, dtypes: _Dtypes, of_rank: Sequence[Sequence[_Item]], parts: Sequence[Any]) -> None:
        like = self._nothing(dtypes)
        for i, k, e, payload in of_rank[self.rank_group.rank]:
            whole = self.library.blank(like, payload.shape)
            for rank in sorted(self.schedule.senders[i][k]):
                rectangle = payload.division.rectangles[rank]
                whole[rectangle] = next(parts[rank]).reshape(_sides(rectangle))
            self.wholes[e.launch][e.place][k] = whole

    def work(self) -> None:
        """Does the work on the tensors that this rank owns, and then on pieces."""
        self.failure.turn += 1
        shared = {(e.launch, e.place) for e in self._mine if e.transfer.share is not None}
        for launch, wholes in self.wholes.items():
            alone = {place: arrays for place, arrays in wholes.items() if (launch, place) not in shared}
            names = [e.transfer.task.name for e in self._mine if e.launch == launch and e.place in alone]
            if alone:
                wholes.update(self.failure.attempt(partial(self.waiting[launch].work, alone), names) or {})
        for like in self._kinds.values():
            self._work_together(like)

    def _work_together(self, like: Share) -> None:
        """Does the work on pieces, with the owners of the other pieces."""
        mine = [e for e in self._mine if e.transfer.share and e.transfer.share.kind == like.kind]
        attempt = partial(self.failure.attempt, tensors=[e.transfer.task.name for e in mine])
        pieces = [
            MatrixPiece(share, e.transfer.task.owner - share.place, attempt(partial(self._piece, e)))
            for e in mine if (share := e.transfer.share) is not None
        ]  # fmt: skip
        quintic = self.library.quintic(like.dtype, like.form)
        team = SplitNewtonSchulz(self.rank_group, quintic, pieces, self.library.empty(0), attempt)
        for e, result in zip(mine, team.orthogonalized(like) or (), strict=False):
            self.wholes[e.launch][e.place] = [_long(result, e.transfer.axis)]

    def _piece(self, entry: _Entry) -> Any:
        (piece,) = self.wholes[entry.launch][entry.place]
        return _long(piece, entry.transfer.axis)

    def scatter(self) -> None:
        """Begins to send every rank its shards of the results."""
        self.failure.turn += 1
        if self.failure.error is not None:
            self.wholes = {}
        for dtypes, of_rank in self._back.items():
            mine = of_rank[self.rank_group.rank]
            shares = [sum(int(x.division.counts[rank]) for *_, x in mine) for rank in range(self.rank_group.size)]
            self._begin(dtypes, partial(self._cut, mine), shares, self._counts_back(of_rank))
        self.wholes = {}

    def _cut(self, mine: Sequence[_Item]) -> list[Any]:
        """The shards of each rank of the results of this rank."""
        whole = [(self.wholes[e.launch][e.place][k], x) for _, k, e, x in mine]
        return [array[x.division.rectangles[rank]] for rank in range(self.rank_group.size) for array, x in whole]

    def collect(self, results: Sequence[list[list[Any]]]) -> None:
        """Takes the local shard of every result into `results`."""
        self.failure.turn += 1
        for dtypes, of_rank in self._back.items():
            self._arrived(dtypes, self._counts_back(of_rank), partial(self._put_back, results, of_rank))

    def _put_back(
        self, results: Sequence[list[list[Any]]], of_rank: Sequence[Sequence[_Item]], parts: Sequence[Any]
    ) -> None:
        for theirs, received in zip(of_rank, parts, strict=True):
            for _, k, e, payload in theirs:
                part = next(received).reshape(_sides(payload.division.rectangles[self.rank_group.rank]))
                before = results[e.launch][e.place][k]
                if before is None or not math.prod(before.shape):
                    results[e.launch][e.place][k] = part
                elif math.prod(part.shape):
                    results[e.launch][e.place][k] = self.library.join([before, part], e.transfer.axis)

    def _sends(self, rank: int, tensor: int, array: int) -> bool:
        return rank in self.schedule.senders[tensor][array]

    def _counts_there(self, of_rank: Sequence[Sequence[_Item]]) -> list[list[int]]:
        """The receive counts on the way to owners: the elements of each shard from each rank."""
        mine = of_rank[self.rank_group.rank]
        return [
            [int(x.division.counts[rank]) for i, k, _, x in mine if self._sends(rank, i, k)]
            for rank in range(self.rank_group.size)
        ]

    def _counts_back(self, of_rank: Sequence[Sequence[_Item]]) -> list[list[int]]:
        """The receive counts on the way back: the elements of each result's shard from each rank."""
        return [[int(x.division.counts[self.rank_group.rank]) for *_, x in theirs] for theirs in of_rank]

    def _nothing(self, dtypes: _Dtypes) -> Any:
        return self.library.cast(self.library.empty(0), dtypes[1])

    def _begin(
        self, dtypes: _Dtypes, sent: Callable[[], Sequence[Any]], shares: Sequence[int], counts: Sequence[Sequence[int]]
    ) -> None:
        """Begins an all-to-all: `shares` are the send counts for each rank, `counts` the receive counts from each."""
        message = self.failure.attempt(partial(self._message, dtypes, sent))
        if message is None:
            message = self.library.blank(self._nothing(dtypes), (sum(shares),))
        self._pending[dtypes] = self.rank_group.exchange(message, shares, [sum(each) for each in counts], dtypes[0])

    def _message(self, dtypes: _Dtypes, sent: Callable[[], Sequence[Any]]) -> Any:
        vectors = [self.library.cast(array.reshape(-1), dtypes[1]) for array in sent()]
        return self.library.join(vectors or [self._nothing(dtypes)], 0)

    def _arrived(
        self, dtypes: _Dtypes, counts: Sequence[Sequence[int]], use: Callable[[Sequence[Any]], None]
    ) -> None:  # fmt: skip
        """Waits for the vectors of each rank, with these receive counts, and calls `use` on them."""
        pending = self._pending.pop(dtypes)
        pending.wait()
        self.failure.attempt(lambda: use(_vectors(pending.received(), counts)))


def _elements(sent: Sequence[Sequence[Payload]]) -> list[Any]:
    return [x.elements for theirs in sent for x in theirs]


def _vectors(received: Any, counts: Sequence[Sequence[int]]) -> list[Any]:
    """The vectors from each rank, one by one."""
    begin = 0
    parts: list[Any] = []
    for each in counts:
        parts.append(iter([received[begin : (begin := begin + count)] for count in each]))
    return parts


def _by_owner(items: Sequence[_Item], size: int) -> dict[_Dtypes, list[list[_Item]]]:
    """Arrays by their dtypes and the rank of their owner."""
    by_owner: dict[_Dtypes, list[list[_Item]]] = {}
    for item in items:
        dtypes = item[3].dtype, item[3].computed
        by_owner.setdefault(dtypes, [[] for _ in range(size)])[item[2].transfer.task.owner].append(item)
    return by_owner


def _sides(rectangle: Sequence[slice]) -> list[int]:
    return [side.stop - side.start for side in rectangle]


def _long(piece: Any, axis: int) -> Any:
    """A piece of a matrix that is cut along an axis, with this axis last; the same call turns it back."""
    return piece if axis else piece.swapaxes(0, 1)
