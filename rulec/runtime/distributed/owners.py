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
from rulec.language.expr.newton_schulz import Coefficients
from rulec.language.expr.static import MUON, NORM

Rectangle = tuple[slice, ...]
Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Division:
    """How a tensor lies over processes: a rectangle of it in each, by rank. Replicas have the same one."""

    rectangles: tuple[Rectangle, ...]
    _pieces: dict[Any, Division] = field(default_factory=dict, repr=False)

    def piece(self, axis: int, start: int, stop: int) -> Division:
        """The division of a piece of the tensor: of what lies from `start` to `stop` along an axis."""
        key = axis, start, stop
        if key not in self._pieces:
            nowhere = tuple(slice(0, 0) for _ in self.rectangles[0])
            cut = [(*r[:axis], _within(r[axis], start, stop), *r[axis + 1 :]) for r in self.rectangles]
            self._pieces[key] = Division(tuple(r if r[axis].stop > r[axis].start else nowhere for r in cut))
        return self._pieces[key]

    @cached_property
    def counts(self) -> Counts:
        """The number of elements in each process."""
        return np.array([math.prod(s.stop - s.start for s in sides) for sides in self.rectangles], np.int64)

    @cached_property
    def holders(self) -> Counts:
        """The processes with each rectangle that is not empty, one line for each: `(rectangles, replicas)`."""
        holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for rank in np.flatnonzero(self.counts):
            holders.setdefault(tuple((s.start, s.stop) for s in self.rectangles[rank]), []).append(int(rank))
        return np.array([*holders.values()], np.int64).reshape(len(holders), -1 if holders else 1)

    @cached_property
    def numel(self) -> int:
        """The number of elements of the tensor."""
        return int(self.counts[self.holders[:, 0]].sum()) if len(self.holders) else 0


@dataclass(frozen=True)
class Load:
    """The arrays of one tensor on their way to its owner, and the results on theirs: how each lies, and its dtype.

    Of a piece of a tensor with several owners, `share` is its owner's share of the work.
    """

    there: tuple[tuple[Division, str], ...]
    back: tuple[tuple[Division, str], ...]
    share: Share | None = None

    @property
    def bytes(self) -> int:
        """The bytes of the whole arrays that go there, or of one result where none does, and of work on a share."""
        whole = sum(ITEM_SIZE[dtype] * division.numel for division, dtype in self.there or self.back[:1])
        return whole + (0 if self.share is None else self.share.room)

    @property
    def held(self) -> Counts:
        """The bytes of all arrays in each process, which it need not send or get where it is the owner."""
        counts = [ITEM_SIZE[dtype] * division.counts for division, dtype in (*self.there, *self.back)]
        return np.asarray(sum(counts), np.int64)

    @property
    def least(self) -> int:
        """The bytes that all processes send where the tensor goes to the one with the largest parts."""
        there = sum(ITEM_SIZE[dtype] * division.numel for division, dtype in self.there)
        return there + sum(ITEM_SIZE[dtype] * int(d.counts.sum()) for d, dtype in self.back) - int(self.held.max())


@dataclass(frozen=True, eq=False)
class Schedule:
    """The ways of some tensors to their owners and back.

    Tensors are told by their places. `owners` are the processes that work on them, by rank. `senders` are, for each
    array of each tensor, the processes that send the owner its parts: one for each rectangle, the owner itself where it
    has it. `buckets` are the tensors that travel together, one bucket after the other.
    """

    loads: tuple[Load, ...]
    owners: tuple[int, ...]
    senders: tuple[tuple[frozenset[int], ...], ...]
    buckets: tuple[tuple[int, ...], ...]

    def sent(self, size: int) -> list[int]:
        """The bytes that each of so many processes sends to others, there and back."""
        sent = np.zeros(size, np.int64)
        for load, owner, senders in zip(self.loads, self.owners, self.senders, strict=True):
            for (division, dtype), ranks in zip(load.there, senders, strict=True):
                others = [rank for rank in ranks if rank != owner]
                sent[others] += ITEM_SIZE[dtype] * division.counts[others]
            sent[owner] += _back(load, owner)
        return [int(count) for count in sent]

    def between(self, size: int) -> list[int]:
        """The bytes that each of so many processes sends to other owners of the same matrices."""
        sent = [0] * size
        for load, owner in zip(self.loads, self.owners, strict=True):
            sent[owner] += 0 if load.share is None else load.share.sent
        return sent

    @property
    def exchanges(self) -> int:
        """The exchanges between owners that share work: matrices of a bucket with equal steps go together."""
        kinds = [{s.kind: s for i in b if (s := self.loads[i].share) is not None} for b in self.buckets]
        return sum(share.exchanges for each in kinds for share in each.values())

    @property
    def least(self) -> int:
        """The bytes that all processes send where each tensor goes to the one with the largest parts of it."""
        return sum(load.least for load in self.loads)


@functools.lru_cache(maxsize=32)
def schedule_of(loads: tuple[Load, ...], owners: tuple[int, ...], size: int, room: int) -> Schedule:
    """The schedule of tensors among `size` processes, the longest work first, with `room` bytes in a bucket for each.

    A bucket has at least one tensor of every process that has tensors left.
    """
    return Schedule(loads, owners, _senders(loads, owners, size), _buckets(loads, owners, room))


def owners_of(
    costs: Sequence[float], size: int, parts: Sequence[Counts] = (), teams: Sequence[int] = ()
) -> list[int]:  # fmt: skip
    """The process for each piece of work: the longest first, each to the process with the least so far.

    Among processes with equal loads it is the one with the largest of the `parts`, then the first. Afterwards a piece
    moves to a process with a larger part where the busiest process gets no more work by it. `teams` are the numbers of
    processes with a piece of such a cost each. They follow one another, and the result has the first of them.
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
    """The senders of the parts of each array: of replicas the owner, or the one with the fewest bytes so far."""
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
    """The bytes of results that an owner sends: every other process gets its part."""
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
    """What a side has from `start` to `stop`, counted from `start`."""
    begin = min(max(side.start, start), stop)
    return slice(begin - start, max(begin, min(side.stop, stop)) - start)


#: The multiplications that a device does while it sends a byte: 400 TFLOP/s beside 400 GB/s.
BYTE = 500.0

#: Pieces have at most this much of the mean work of a process. Smaller ones balance better, and send more.
_PARTS_OF_MEAN = (1.0, 0.5, 0.25)

#: The processes that exchange with one another, where there are replicas that may work alone.
_LARGEST = 512

#: Other owners are taken where the busiest process is then done in this part of the time.
_GAIN = 0.9


@dataclass(frozen=True)
class Work:
    """The work on one whole tensor, in multiplications.

    `there` and `back` are the bytes of each element on its way to the owner, and of each result. `share` is that of a
    single owner where several may share the work.
    """

    cost: float
    there: int = 0
    back: int = 0
    share: Share | None = None

    def of_each(self, count: int) -> float:
        """The work of one of `count` owners, and the time for what they send to each other."""
        between = 0 if self.share is None else replace(self.share, count=count).sent
        return self.cost / count + BYTE * between


@dataclass(frozen=True)
class Assignment:
    """The owners of each tensor, of which several follow one another, and the time of the busiest process.

    The time is in multiplications, with bytes that it gets and sends.
    """

    owners: tuple[tuple[int, ...], ...]
    busiest: float

    def load(self, works: Sequence[Work], size: int) -> Any:
        """The multiplications of each process."""
        loads = np.zeros(size)
        for work, owners in zip(works, self.owners, strict=True):
            loads[[*owners]] += work.cost / len(owners)
        return loads


@functools.lru_cache(maxsize=32)
def assignment(works: tuple[Work, ...], size: int, parts: tuple[Division, ...]) -> Assignment:
    """The owners among `size` processes of tensors that lie so, by the longest processing time first.

    A matrix is shared where its work is more than the mean of all processes, and the busiest is done a tenth sooner.
    """
    best = _assigned(works, size, parts, [1] * len(works))
    mean = sum(work.cost for work in works) / size
    if any(work.share is not None and work.cost > mean for work in works):
        for part in _PARTS_OF_MEAN:
            other = _assigned(works, size, parts, [_count(work, mean, mean * part, size) for work in works])
            best = other if other.busiest < best.busiest * _GAIN else best
    return best


def share_pays(every: Assignment, alone: Assignment, size: int) -> bool:
    """Whether the busiest owner among all `size` processes of replicas is done before that of replicas by themselves.

    Else, as where tensors are fewer than processes, a replica works alone: an owner would send its results to the
    processes of all replicas, while most of these have nothing to do; so it does where there are too many processes for
    each to keep a connection to every other.
    """
    return size <= _LARGEST and every.busiest < alone.busiest * (1 - 1e-9)


def _count(work: Work, mean: float, most: float, size: int) -> int:
    """The number of owners of a tensor: the least power of two with at most so much work for each, if that pays."""
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
    """The share of one of several owners in `newton_schulz` of a matrix: its place among `count` of them.

    `rows` is the shorter side of the matrix. Each owner adds up some rows of the Gram matrix, and gives them to all.
    """

    rows: int
    steps: int
    dtype: str
    place: int = 0
    count: int = 1
    coefficients: str | Coefficients = MUON
    normalize: str | float = NORM

    @property
    def kind(self) -> tuple[int, str, str | Coefficients, str | float]:
        """The properties in which matrices of one batch are equal."""
        return self.steps, self.dtype, self.coefficients, self.normalize

    @property
    def wide(self) -> str:
        """The dtype of sums."""
        return "float64" if self.dtype == "float64" else "float32"

    def block(self, place: int) -> slice:
        """The rows of the Gram matrix that the owner at this place adds up."""
        return slice(self.rows * place // self.count, self.rows * (place + 1) // self.count)

    @property
    def room(self) -> int:
        """The bytes that the work needs beside the piece: sums here and of others, the Gram matrix, its polynomial."""
        item: int = ITEM_SIZE[self.wide] + ITEM_SIZE[self.dtype]
        return 2 * self.rows * self.rows * item if self.count > 1 else 0

    @property
    def exchanges(self) -> int:
        """The exchanges between the owners: of squares, then in each step of sums, rows and polynomials."""
        return 1 + 3 * self.steps if self.count > 1 else 0

    @property
    def sent(self) -> int:
        """The bytes that this owner sends to the others."""
        mine, others = self.block(self.place), self.count - 1
        sums = (self.rows - (mine.stop - mine.start)) * ITEM_SIZE[self.wide]
        rows = 2 * (mine.stop - mine.start) * others * ITEM_SIZE[self.dtype]
        products: int = self.steps * self.rows * (sums + rows)
        return 8 * others + products
