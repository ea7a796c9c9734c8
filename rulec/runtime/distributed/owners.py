"""The owner of each whole tensor, the replica that sends each part of it, and the buckets of messages.

Every process knows how all tensors are divided, so all come to the same schedule without a word.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rulec.compiler.layout import ITEM_SIZE
from rulec.runtime.distributed.share import Share

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
