"""Matrices of which every process has a part: each goes whole to one process, its owner, and the result comes back.

Everything that launches wait for travels together: one exchange gathers, and one scatters. Owners are chosen anew in
each exchange, by the longest processing time first, so that the busiest process has little more work than the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rulec.arrays.library import Library

Rectangle = tuple[slice, ...]


class Owners(Protocol):
    """Processes that exchange parts of tensors; `rank` is this one among `size`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def exchange(self, sent: Any, counts: Sequence[int], received: Sequence[int], dtype: str) -> Any:
        """Sends each process its share of a vector, `counts` long, and returns what they send, `received` long.

        Elements travel in `dtype`, and come in that of `sent`.
        """
        ...


@dataclass(frozen=True)
class Spread:
    """How a tensor lies over processes: a rectangle of it in each, by rank."""

    owners: Owners
    rectangles: tuple[Rectangle, ...]

    def count(self, rank: int) -> int:
        """The number of elements in a process."""
        return math.prod(side.stop - side.start for side in self.rectangles[rank])


@dataclass(frozen=True, eq=False)
class Parcel:
    """The part here of a tensor that is needed whole: its elements in the tensor's order, and the cost of its work."""

    elements: Any
    shape: tuple[int, ...]
    spread: Spread
    cost: float


@dataclass(eq=False)
class Gathering:
    """A wait of a launch for whole tensors: it is sent its own ones, by their places among the shares.

    `dtype` is that of the work, which elements are rounded to first, and of its results: so they travel in it.
    """

    shares: Sequence[Parcel]
    library: Library
    dtype: str
    ranks: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Scattering:
    """The results for the tensors that were gathered here; the launch is sent the part here of every result."""

    gathering: Gathering
    results: Mapping[int, Any]

    @property
    def library(self) -> Library:
        """The library of the results."""
        return self.gathering.library


def owners_of(costs: Sequence[float], count: int) -> list[int]:
    """The process for each piece of work: the longest first, each to the process with the least so far."""
    loads, chosen = [0.0] * count, [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda i: -costs[i]):
        chosen[place] = loads.index(min(loads))
        loads[chosen[place]] += costs[place]
    return chosen


def gathered(waiting: Sequence[Gathering]) -> list[dict[int, Any]]:
    """The whole tensors that this process owns, for each launch."""
    results: list[dict[int, Any]] = [{} for _ in waiting]
    for gathering in waiting:
        gathering.ranks = [0] * len(gathering.shares)
    for (owners, _), entries in _by_owners(waiting).items():
        chosen = owners_of([entry.share.cost for entry in entries], owners.size)
        for entry, rank in zip(entries, chosen, strict=True):
            waiting[entry.launch].ranks[entry.place] = rank
        of_rank = [[e for e, at in zip(entries, chosen, strict=True) if at == rank] for rank in range(owners.size)]
        sent = [[entry.share.elements.reshape(-1) for entry in theirs] for theirs in of_rank]
        mine = of_rank[owners.rank]
        counts = [[entry.share.spread.count(rank) for entry in mine] for rank in range(owners.size)]
        parts = _exchanged(waiting[entries[0].launch], owners, sent, counts)
        library = waiting[entries[0].launch].library
        for number, entry in enumerate(mine):
            whole = library.blank(entry.share.elements, entry.share.shape)
            for rectangle, theirs in zip(entry.share.spread.rectangles, parts, strict=True):
                whole[rectangle] = theirs[number].reshape([side.stop - side.start for side in rectangle])
            results[entry.launch][entry.place] = whole
    return results


def scattered(waiting: Sequence[Scattering]) -> list[list[Any]]:
    """The part here of every result, for each launch, in the shape of its share."""
    gatherings = [scattering.gathering for scattering in waiting]
    results: list[list[Any]] = [[None] * len(gathering.shares) for gathering in gatherings]
    for (owners, _), entries in _by_owners(gatherings).items():
        of_rank: list[list[_Entry]] = [[] for _ in range(owners.size)]
        for entry in entries:
            of_rank[gatherings[entry.launch].ranks[entry.place]].append(entry)
        sent = [
            [
                waiting[e.launch].results[e.place][e.share.spread.rectangles[rank]].reshape(-1)
                for e in of_rank[owners.rank]
            ]
            for rank in range(owners.size)
        ]
        counts = [[entry.share.spread.count(owners.rank) for entry in theirs] for theirs in of_rank]
        parts = _exchanged(gatherings[entries[0].launch], owners, sent, counts)
        for theirs, received in zip(of_rank, parts, strict=True):
            for entry, part in zip(theirs, received, strict=True):
                results[entry.launch][entry.place] = part.reshape(entry.share.elements.shape)
    return results


@dataclass(frozen=True, eq=False)
class _Entry:
    """A share, with its launch and its place there."""

    launch: int
    place: int
    share: Parcel


def _by_owners(waiting: Sequence[Gathering]) -> dict[tuple[Owners, str], list[_Entry]]:
    """The shares by the processes that exchange them, and the dtype they travel in."""
    by_owners: dict[tuple[Owners, str], list[_Entry]] = {}
    for launch, gathering in enumerate(waiting):
        for place, share in enumerate(gathering.shares):
            by_owners.setdefault((share.spread.owners, gathering.dtype), []).append(_Entry(launch, place, share))
    return by_owners


def _exchanged(
    first: Gathering, owners: Owners, sent: Sequence[Sequence[Any]], counts: Sequence[Sequence[int]]
) -> list[list[Any]]:
    """Sends each process its vectors, and returns the vectors of each, of so many elements."""
    nothing = first.library.blank(first.shares[0].elements, (0,))
    message = first.library.join([vector for vectors in sent for vector in vectors] or [nothing], 0)
    shares = [sum(len(vector) for vector in vectors) for vectors in sent]
    received = owners.exchange(message, shares, [sum(each) for each in counts], first.dtype)
    parts: list[list[Any]] = []
    begin = 0
    for each in counts:
        parts.append([received[begin : (begin := begin + count)] for count in each])
    return parts
