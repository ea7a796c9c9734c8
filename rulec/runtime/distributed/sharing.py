"""The owners of tensors: one process for each, or several for a matrix of much work.

Several owners of a matrix have pieces of it, cut across its longest side; see `newton_schulz` beside it.
They follow one another, two, four, eight and so on, so they mostly are neighbours on one machine.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rulec.runtime.distributed.owners import Division, owners_of
from rulec.runtime.distributed.share import Share

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
