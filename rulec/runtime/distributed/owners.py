"""The choice of owner ranks: the owner of each global tensor, the replica that sends each shard, the message buckets.

Every rank knows how all tensors are sharded, so all compute the same schedule without a message. A tensor has one
owner. A matrix of much work may have several: each has a piece, cut across the longest side (see `newton_schulz` beside
this module). Several owners are 2, 4, 8 or more consecutive ranks, so they mostly are neighbours on one machine.
`Share` is the part of one such owner in the work on a matrix: its memory, and the bytes that it sends to the other
owners.

Used by `all_to_all`, `owner_plan`, and by `rulec.torch.distributed.traffic`, which reports the schedule.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from rulec.compiler.layout import ITEM_SIZE
from rulec.language.expr.newton_schulz import Coefficients, coefficients_of, in_blocks, iterated_in
from rulec.language.expr.static import DIRECT, MUON, NORM

Rectangle = tuple[slice, ...]
Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Division:
    """The division of a tensor over ranks: one rectangle for each rank. Replicas have the same rectangle."""

    rectangles: tuple[Rectangle, ...]
    _pieces: dict[Any, Division] = field(default_factory=dict, repr=False)

    def piece(self, axis: int, start: int, stop: int) -> Division:
        """The division of a piece of the tensor: of the elements from `start` to `stop` along an axis."""
        key = axis, start, stop
        if key not in self._pieces:
            nowhere = tuple(slice(0, 0) for _ in self.rectangles[0])
            cut = [(*r[:axis], _within(r[axis], start, stop), *r[axis + 1 :]) for r in self.rectangles]
            self._pieces[key] = Division(tuple(r if r[axis].stop > r[axis].start else nowhere for r in cut))
        return self._pieces[key]

    @cached_property
    def counts(self) -> Counts:
        """The number of elements in each rank."""
        return np.array([math.prod(s.stop - s.start for s in sides) for sides in self.rectangles], np.int64)

    @cached_property
    def holders(self) -> Counts:
        """The ranks with each rectangle that is not empty, one line for each rectangle: `(rectangles, replicas)`."""
        holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for rank in np.flatnonzero(self.counts):
            holders.setdefault(tuple((s.start, s.stop) for s in self.rectangles[rank]), []).append(int(rank))
        return np.array([*holders.values()], np.int64).reshape(len(holders), -1 if holders else 1)

    @cached_property
    def numel(self) -> int:
        """The number of elements of the global tensor."""
        return int(self.counts[self.holders[:, 0]].sum()) if len(self.holders) else 0


@dataclass(frozen=True)
class Load:
    """The arrays of one tensor on the way to its owner, and the results on the way back: divisions and dtypes.

    For a piece of a tensor with several owners, `share` is its owner's share of the work.
    """

    there: tuple[tuple[Division, str], ...]
    back: tuple[tuple[Division, str], ...]
    share: Share | None = None

    @property
    def bytes(self) -> int:
        """The bytes of the global arrays for the owner, or of one result without such arrays; and of a share's work."""
        whole = sum(ITEM_SIZE[dtype] * division.numel for division, dtype in self.there or self.back[:1])
        return whole + (0 if self.share is None else self.share.room)

    @property
    def held(self) -> Counts:
        """The bytes of all arrays in each rank; an owner need not send or receive its bytes."""
        counts = [ITEM_SIZE[dtype] * division.counts for division, dtype in (*self.there, *self.back)]
        return np.asarray(sum(counts), np.int64)

    @property
    def least(self) -> int:
        """The bytes that all ranks send where the rank with the largest shards is the owner."""
        there = sum(ITEM_SIZE[dtype] * division.numel for division, dtype in self.there)
        return there + sum(ITEM_SIZE[dtype] * int(d.counts.sum()) for d, dtype in self.back) - int(self.held.max())


@dataclass(frozen=True, eq=False)
class Schedule:
    """The schedule of the all-to-alls that bring some tensors to their owner ranks and back.

    Tensors are identified by index. `owners` has the owner rank of each. `senders` has, for each array of each tensor,
    the ranks that send their shards to the owner: one rank for each rectangle, the owner itself where it has the
    rectangle. `buckets` are the tensors that travel together, one bucket after the other.
    """

    loads: tuple[Load, ...]
    owners: tuple[int, ...]
    senders: tuple[tuple[frozenset[int], ...], ...]
    buckets: tuple[tuple[int, ...], ...]

    def sent(self, size: int) -> list[int]:
        """The bytes that each of `size` ranks sends to other ranks, to owners and back."""
        sent = np.zeros(size, np.int64)
        for load, owner, senders in zip(self.loads, self.owners, self.senders, strict=True):
            for (division, dtype), ranks in zip(load.there, senders, strict=True):
                others = [rank for rank in ranks if rank != owner]
                sent[others] += ITEM_SIZE[dtype] * division.counts[others]
            sent[owner] += _back(load, owner)
        return [int(count) for count in sent]

    def between(self, size: int) -> list[int]:
        """The bytes that each of `size` ranks sends to other owners of the same matrices."""
        sent = [0] * size
        for load, owner in zip(self.loads, self.owners, strict=True):
            sent[owner] += 0 if load.share is None else load.share.sent
        return sent

    @property
    def exchanges(self) -> int:
        """The number of all-to-alls between owners of one matrix; matrices of a bucket with equal steps share them."""
        kinds = [{s.kind: s for i in b if (s := self.loads[i].share) is not None} for b in self.buckets]
        return sum(share.exchanges for each in kinds for share in each.values())

    @property
    def least(self) -> int:
        """The bytes that all ranks send where each tensor's owner is the rank with the largest shards of it."""
        return sum(load.least for load in self.loads)


@functools.lru_cache(maxsize=32)
def schedule_of(loads: tuple[Load, ...], owners: tuple[int, ...], size: int, room: int) -> Schedule:
    """The schedule of tensors among `size` ranks, the longest work first, with `room` bytes in a bucket for each rank.

    A bucket has at least one tensor of every owner rank that has tensors left.
    """
    return Schedule(loads, owners, _senders(loads, owners, size), _buckets(loads, owners, room))


def owners_of(
    costs: Sequence[float], size: int, parts: Sequence[Counts] = (), teams: Sequence[int] = ()
) -> list[int]:  # fmt: skip
    """The owner rank for each piece of work: the longest first, each to the rank with the least work so far.

    Among ranks with equal loads it is the rank with the largest of the `parts`, then the first one. Afterwards work
    moves to a rank with a larger shard where the busiest rank gets no more work by it. `teams` has the number of
    owners of each piece of work; each owner has this cost. They are consecutive ranks, and the result has the first.
    """
    loads, chosen = np.zeros(size), [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda i: -costs[i]):
        team = teams[place] if len(teams) else 1
        if team > 1:
            most = loads[: size // team * team].reshape(-1, team).max(axis=1)
            chosen[place] = int(most.argmin()) * team
        else:
            idle = np.flatnonzero(loads == loads.min())
            chosen[place] = int(idle[parts[place][idle].argmax()] if len(parts) else idle[0])
        loads[chosen[place] : chosen[place] + team] += costs[place]
    alone = [place for place in range(len(parts)) if not len(teams) or teams[place] == 1]
    for place in sorted(alone, key=lambda i: int(parts[i][chosen[i]] - parts[i].max())):
        part, most = parts[place], loads.max()
        able = np.flatnonzero((part > part[chosen[place]]) & (loads + costs[place] <= most))
        if len(able):
            loads[chosen[place]] -= costs[place]
            chosen[place] = int(able[part[able].argmax()])
            loads[chosen[place]] += costs[place]
    return chosen


def _senders(
    loads: Sequence[Load], owners: Sequence[int], size: int
) -> tuple[tuple[frozenset[int], ...], ...]:  # fmt: skip
    """The ranks that send the shards of each array: of replicas the owner, or the one with the fewest bytes so far."""
    sent = np.zeros(size, np.int64)
    for load, owner in zip(loads, owners, strict=True):
        sent[owner] += _back(load, owner)
    senders = []
    for load, owner in zip(loads, owners, strict=True):
        each = []
        for division, dtype in load.there:
            holders = division.holders
            chosen = holders[np.arange(len(holders)), sent[holders].argmin(axis=1)] if len(holders) else holders[:, 0]
            chosen[(holders == owner).any(axis=1)] = owner
            others = chosen[chosen != owner]
            sent[others] += ITEM_SIZE[dtype] * division.counts[others]
            each.append(frozenset(chosen.tolist()))
        senders.append(tuple(each))
    return tuple(senders)


def _back(load: Load, owner: int) -> int:
    """The bytes of results that an owner sends: every other rank gets its shard."""
    return sum(ITEM_SIZE[dtype] * int(d.counts.sum() - d.counts[owner]) for d, dtype in load.back)


def _buckets(loads: Sequence[Load], owners: Sequence[int], room: int) -> tuple[tuple[int, ...], ...]:
    """The tensors of each bucket, in order: every owner fills its share with the longest work left.

    `loads` are sorted by their work, the longest first. The pieces of a matrix follow one another in one bucket.
    """
    buckets: list[list[int]] = []
    filled: dict[int, tuple[int, int]] = {}
    place = 0
    while place < len(loads):
        share = loads[place].share
        pieces = range(place, place + (1 if share is None else share.count))
        each = [filled.get(owners[i], (0, 0)) for i in pieces]
        number = max(
            at + (size > 0 and size + loads[i].bytes > room) for i, (at, size) in zip(pieces, each, strict=True)
        )
        if number == len(buckets):
            buckets.append([])
        buckets[number] += pieces
        for i, (at, size) in zip(pieces, each, strict=True):
            filled[owners[i]] = number, loads[i].bytes + (size if at == number else 0)
        place = pieces.stop
    return tuple(map(tuple, buckets))


def _within(side: slice, start: int, stop: int) -> slice:
    """The part of a side between `start` and `stop`, counted from `start`."""
    begin = min(max(side.start, start), stop)
    return slice(begin - start, max(begin, min(side.stop, stop)) - start)


#: The multiplications that a device does while it sends a byte: 400 TFLOP/s beside 400 GB/s.
BYTE = 500.0

#: Pieces have at most this much of the mean work of a rank. Smaller ones balance better, and send more.
_PARTS_OF_MEAN = (1.0, 0.5, 0.25)

#: The largest number of ranks in one all-to-all, where there are replicas that may work alone.
_LARGEST = 512

#: Other owners are chosen where the busiest rank is then done in this part of the time.
_GAIN = 0.9


@dataclass(frozen=True)
class Work:
    """The work on one global tensor, in multiplications.

    `there` and `back` are the bytes of each element on its way to the owner, and of each element of the result. `share`
    is the share of a single owner where ranks may split the work.
    """

    cost: float
    there: int = 0
    back: int = 0
    share: Share | None = None

    def of_each(self, count: int) -> float:
        """The work of one of `count` owners, with the time for the messages between owners."""
        between = 0 if self.share is None else replace(self.share, count=count).sent
        return self.cost / count + BYTE * between


@dataclass(frozen=True)
class Assignment:
    """The owner ranks of each tensor, which are consecutive ranks, and the time of the busiest rank.

    The time is in multiplications, and counts the bytes that this rank receives and sends.
    """

    owners: tuple[tuple[int, ...], ...]
    busiest: float

    def load(self, works: Sequence[Work], size: int) -> Any:
        """The multiplications of each rank."""
        loads = np.zeros(size)
        for work, owners in zip(works, self.owners, strict=True):
            loads[[*owners]] += work.cost / len(owners)
        return loads


@functools.lru_cache(maxsize=32)
def assignment(works: tuple[Work, ...], size: int, parts: tuple[Division, ...]) -> Assignment:
    """The owners among `size` ranks of tensors with these divisions, by the longest processing time first.

    A matrix is split where its work is more than the mean of all ranks, and the busiest rank is done a tenth sooner.
    """
    best = _assigned(works, size, parts, [1] * len(works))
    mean = sum(work.cost for work in works) / size
    if any(work.share is not None and work.cost > mean for work in works):
        for part in _PARTS_OF_MEAN:
            other = _assigned(works, size, parts, [_count(work, mean, mean * part, size) for work in works])
            best = other if other.busiest < best.busiest * _GAIN else best
    return best


def share_pays(every: Assignment, alone: Assignment, size: int) -> bool:
    """Whether the busiest owner among all `size` ranks of replicas is done before the busiest of one replica alone.

    Else a replica works alone, as where tensors are fewer than ranks: an owner would send its results to the ranks of
    all replicas, while most ranks have nothing to do. A replica also works alone where there are too many ranks for
    each to keep a connection to every other rank.
    """
    return size <= _LARGEST and every.busiest < alone.busiest * (1 - 1e-9)


def _count(work: Work, mean: float, most: float, size: int) -> int:
    """The number of owners of a tensor: the least power of two with at most `most` work for each, if profitable."""
    if work.share is None or work.cost <= mean:
        return 1
    count = 1
    while work.cost > most * count and 2 * count <= min(size, work.share.rows):
        count *= 2
    return count if work.of_each(count) < work.cost else 1


def _assigned(works: Sequence[Work], size: int, parts: Sequence[Division], counts: Sequence[int]) -> Assignment:
    costs = [work.of_each(count) for work, count in zip(works, counts, strict=True)]
    first = owners_of(costs, size, [division.counts for division in parts], counts)
    owners = tuple(tuple(range(at, at + count)) for at, count in zip(first, counts, strict=True))
    times = np.zeros(size)
    for work, cost, part, team in zip(works, costs, parts, owners, strict=True):
        moved = work.there * part.numel + work.back * int(part.counts.sum())
        times[[*team]] += cost + BYTE * moved / len(team)
    return Assignment(owners, float(times.max(initial=0.0)))


@dataclass(frozen=True)
class Share:
    """The share of one of several owners in `newton_schulz` of a matrix: its index `place` among `count` owners.

    `rows` is the shorter side of the matrix, which may be `square`. Each owner adds up some rows of the Gram matrix,
    and sends them to all.
    """

    rows: int
    steps: int
    dtype: str
    place: int = 0
    count: int = 1
    coefficients: str | Coefficients = MUON
    normalize: str | float = NORM
    form: str = DIRECT
    square: bool = False

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties in which matrices of one batch are equal."""
        blocks = tuple(len(block) for block in self.blocks)
        return self.steps, self.dtype, self.coefficients, self.normalize, self.form, blocks

    @property
    def blocks(self) -> tuple[Coefficients, ...]:
        """The iterations between two products with the matrix."""
        return in_blocks(coefficients_of(self.coefficients, self.steps), self.form, 1, 1 if self.square else 2)

    @property
    def iterated(self) -> str:
        """The dtype of the iteration, and of its messages."""
        return str(iterated_in(self.dtype, self.form))

    @property
    def wide(self) -> str:
        """The dtype of sums."""
        return "float64" if self.dtype == "float64" else "float32"

    def block(self, place: int) -> slice:
        """The rows of the Gram matrix that the owner with this index adds up."""
        return slice(self.rows * place // self.count, self.rows * (place + 1) // self.count)

    @property
    def room(self) -> int:
        """The bytes of the work beside the piece: sums of this owner and of others, the Gram matrix, its polynomial."""
        item: int = ITEM_SIZE[self.wide] + ITEM_SIZE[self.iterated]
        return 2 * self.rows * self.rows * item if self.count > 1 else 0

    @property
    def exchanges(self) -> int:
        """The number of all-to-alls between owners: of squares, then of sums, rows and polynomials.

        If a block has several steps, every owner computes all of its matrix from the Gram matrix.
        """
        return 1 + sum(3 if len(block) == 1 else 2 for block in self.blocks) if self.count > 1 else 0

    @property
    def sent(self) -> int:
        """The bytes that this owner sends to the others."""
        mine, others = self.block(self.place), self.count - 1
        sums = (self.rows - (mine.stop - mine.start)) * ITEM_SIZE[self.wide]
        rows = (mine.stop - mine.start) * others * ITEM_SIZE[self.iterated]
        products: int = sum(self.rows * (sums + (2 if len(block) == 1 else 1) * rows) for block in self.blocks)
        return 8 * others + products
