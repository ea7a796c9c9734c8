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


@dataclass(frozen=True, eq=False)
class Schedule:
    """The ways of some tensors to their owners and back.

    Tensors are told by their places. `owners` are the processes that work on them, by rank, and `costs` the work.
    `senders` are the processes that send an owner its parts, one for each rectangle, the owner among them where it has
    one. `buckets` are the tensors that travel together, one bucket after the other.
    """

    divisions: tuple[Division, ...]
    costs: tuple[float, ...]
    owners: tuple[int, ...]
    senders: tuple[frozenset[int], ...]
    buckets: tuple[tuple[int, ...], ...]

    def sent(self, size: int) -> list[int]:
        """The elements that each of so many processes sends to others, there and back."""
        sent = np.zeros(size, np.int64)
        for division, owner, senders in zip(self.divisions, self.owners, self.senders, strict=True):
            others = [rank for rank in senders if rank != owner]
            sent[others] += division.counts[others]
            sent[owner] += _back(division, owner)
        return [int(count) for count in sent]

    @property
    def least(self) -> int:
        """The elements that all processes send where each tensor goes to the one with the largest part of it."""
        return sum(d.numel + int(d.counts.sum()) - 2 * int(d.counts.max()) for d in self.divisions)


@functools.lru_cache(maxsize=32)
def schedule_of(divisions: tuple[Division, ...], costs: tuple[float, ...], size: int, room: int) -> Schedule:
    """The schedule of tensors among `size` processes, of which none gets more than `room` elements in a bucket.

    A bucket has at least one tensor of every process that has tensors left.
    """
    owners = owners_of(costs, size, [division.counts for division in divisions])
    senders = _senders(divisions, owners, size)
    return Schedule(divisions, costs, tuple(owners), senders, _buckets(divisions, costs, owners, room))


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


def _senders(divisions: Sequence[Division], owners: Sequence[int], size: int) -> tuple[frozenset[int], ...]:
    """The processes that send the parts of each tensor: of replicas the owner, or the one that sends least so far."""
    sent = np.zeros(size, np.int64)
    for division, owner in zip(divisions, owners, strict=True):
        sent[owner] += _back(division, owner)
    senders = []
    for division, owner in zip(divisions, owners, strict=True):
        holders = division.holders
        if not len(holders):
            senders.append(frozenset[int]())
            continue
        chosen = holders[np.arange(len(holders)), sent[holders].argmin(axis=1)]
        chosen[(holders == owner).any(axis=1)] = owner
        others = chosen[chosen != owner]
        sent[others] += division.counts[others]
        senders.append(frozenset(chosen.tolist()))
    return tuple(senders)


def _back(division: Division, owner: int) -> int:
    """The elements of a result that an owner sends: every other process gets its part."""
    return int(division.counts.sum() - division.counts[owner])


def _buckets(
    divisions: Sequence[Division], costs: Sequence[float], owners: Sequence[int], room: int
) -> tuple[tuple[int, ...], ...]:  # fmt: skip
    """The tensors of each bucket, in order: every owner fills its share with the longest work left."""
    buckets: list[list[int]] = []
    filled: dict[int, tuple[int, int]] = {}
    for place in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner, numel = owners[place], divisions[place].numel
        number, elements = filled.get(owner, (0, 0))
        if elements and elements + numel > room:
            number, elements = number + 1, 0
        if number == len(buckets):
            buckets.append([])
        buckets[number].append(place)
        filled[owner] = number, elements + numel
    return tuple(tuple(sorted(bucket)) for bucket in buckets)
