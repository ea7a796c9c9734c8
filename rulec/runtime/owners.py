"""Which process works on a whole tensor, which of several replicas sends a part of it, and what travels together.

Every process knows how all tensors are divided, so all come to the same schedule without a word.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rulec.compiler.layout import ITEM_SIZE

Rectangle = tuple[slice, ...]
Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Division:
    """How a tensor lies over processes: a rectangle of it in each, by rank. Replicas have the same one."""

    rectangles: tuple[Rectangle, ...]

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
    """The arrays of one tensor on their way to its owner, and the results on theirs: how each lies, and its dtype."""

    there: tuple[tuple[Division, str], ...]
    back: tuple[tuple[Division, str], ...]

    @property
    def bytes(self) -> int:
        """The bytes of the whole arrays that go there; of one result where none does."""
        return sum(ITEM_SIZE[dtype] * division.numel for division, dtype in self.there or self.back[:1])

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


@functools.lru_cache(maxsize=32)
def owners_by_parts(costs: tuple[float, ...], size: int, parts: tuple[Division, ...]) -> tuple[int, ...]:
    """The owners of tensors that lie so over processes; see `owners_of`."""
    return tuple(owners_of(costs, size, [division.counts for division in parts]))


def share_pays(costs: Sequence[float], shared: Sequence[int], alone: Sequence[int]) -> bool:
    """Whether the busiest owner among all replicas has less work than the busiest where each replica works alone.

    Else, as where tensors are fewer than processes, a replica works alone: an owner would send its results to the
    processes of all replicas, while most of these have nothing to do.
    """
    return _busiest(costs, shared) < _busiest(costs, alone) * (1 - 1e-9)


def _busiest(costs: Sequence[float], owners: Sequence[int]) -> float:
    return float(np.bincount(owners, weights=costs).max()) if owners else 0.0


def owners_of(costs: Sequence[float], size: int, parts: Sequence[Counts] = ()) -> list[int]:
    """The process for each piece of work: the longest first, each to the process with the least so far.

    Among processes with equal loads it is the one with the largest of the `parts`, then the first. Afterwards a piece
    moves to a process with a larger part where the busiest process gets no more work by it.
    """
    loads, chosen = np.zeros(size), [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda i: -costs[i]):
        idle = np.flatnonzero(loads == loads.min())
        chosen[place] = int(idle[parts[place][idle].argmax()] if len(parts) else idle[0])
        loads[chosen[place]] += costs[place]
    for place in sorted(range(len(parts)), key=lambda i: int(parts[i][chosen[i]] - parts[i].max())):
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

    `loads` are sorted by their work, the longest first.
    """
    buckets: list[list[int]] = []
    filled: dict[int, tuple[int, int]] = {}
    for place, (load, owner) in enumerate(zip(loads, owners, strict=True)):
        number, size = filled.get(owner, (0, 0))
        if size and size + load.bytes > room:
            number, size = number + 1, 0
        if number == len(buckets):
            buckets.append([])
        buckets[number].append(place)
        filled[owner] = number, size + load.bytes
    return tuple(map(tuple, buckets))
