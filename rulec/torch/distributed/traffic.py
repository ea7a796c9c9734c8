"""The messages of an optimizer's step to other ranks: a record of the last step, printed as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rulec.errors import RulecError
from rulec.runtime.distributed.owners import Assignment, Schedule, Work

#: Bytes of a number in a reduction: float64, or int64.
_NUMBER = 8


class NamedGroup(Protocol):
    """A named rank group: `rank` is this rank among `size`."""

    @property
    def label(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


@dataclass(frozen=True)
class Reductions:
    """The reductions of a step over one process group.

    `rounds` wait for one another. `numbers` and `bytes` are the length of all messages of this rank together; the
    algorithm of the process group decides how often a byte travels. `device` names the types of devices that messages
    travel by, as `cuda`.
    """

    processes: str
    rounds: int
    numbers: int
    bytes: int
    device: str = "cpu"


@dataclass(frozen=True)
class Exchange:
    """The all-to-alls of matrices in a step, between the ranks of one group.

    `dtype` names the dtypes in which `count` tensors travel. `matrices`, `work` and `sent` have an entry for each rank:
    the number of its tensors, its share of the work from 0 to 1, and the bytes that it sends to others. `rank`
    is this rank. `least` is the number of bytes that all ranks together send where the owner of every tensor is the
    rank with its largest shards, and one replica of each shard is sent to the owner. `buckets` is the number of
    all-to-alls to owners, and of those back.

    `shared` of the matrices have several owners, all of them counted; `between` are the bytes that each rank sends to
    other owners of the same matrices, in `rounds` all-to-alls. `device` is the type of the devices that matrices travel
    by.
    """

    processes: str
    dtype: str
    rank: int
    count: int
    matrices: tuple[int, ...]
    work: tuple[float, ...]
    sent: tuple[int, ...]
    least: int
    buckets: int
    shared: int = 0
    rounds: int = 0
    between: tuple[int, ...] = ()
    device: str = "cpu"

    @property
    def here(self) -> int:
        """The bytes that this rank sends."""
        return self.sent[self.rank]


@dataclass(frozen=True)
class Communication:
    """The messages of a step; printed, tables."""

    reductions: tuple[Reductions, ...] = ()
    exchanges: tuple[Exchange, ...] = ()

    def __str__(self) -> str:
        if not self.reductions and not self.exchanges:
            return "a step sends nothing"
        tables = []
        if self.reductions:
            rows = [(r.processes, r.device, r.rounds, r.numbers, r.bytes) for r in self.reductions]
            tables.append(_table(("reductions over", "by", "rounds", "numbers", "bytes"), rows))
        for e in self.exchanges:
            row = (e.processes, e.device, e.dtype, e.count, e.buckets, e.here, max(e.sent), sum(e.sent), e.least)
            header = (
                "exchanges over",
                "by",
                "dtype",
                "matrices",
                "buckets",
                "bytes sent here",
                "by the busiest",
                "by all",
                "by all at least",
            )
            tables.append(_table(header, [row]))
            owners = enumerate(zip(e.matrices, e.work, e.sent, strict=True))
            of_owner = [(f"process {rank}", count, f"{work:.1%}", sent) for rank, (count, work, sent) in owners]
            tables.append(_table(("owner", "matrices", "work", "bytes sent"), of_owner))
            if e.shared:
                between = ("between owners", "matrices", "exchanges", "bytes sent here", "by the busiest", "by all")
                several = (e.processes, e.shared, e.rounds, e.between[e.rank], max(e.between), sum(e.between))
                tables.append(_table(between, [several]))
        return "\n\n".join(tables)


class Traffic:
    """The messages of a step as they are sent."""

    def __init__(self) -> None:
        self._begun = False
        self._round = 0
        self._reduced: list[tuple[NamedGroup, int, int, str]] = []
        self._owners: list[tuple[NamedGroup, Sequence[Work], Assignment]] = []
        self._moved: list[tuple[NamedGroup, Schedule, str]] = []

    def begin(self) -> None:
        """Begins the record of another step."""
        self._begun, self._round, self._reduced, self._owners, self._moved = True, 0, [], [], []

    def reduced(self, group: Any, numbers: int, device: str) -> None:
        """Records a message of `numbers` numbers of 8 bytes, by a device of this type."""
        self._reduced.append((group, self._round, numbers, device))

    def end_round(self) -> None:
        """Ends a round: later reductions wait for the results so far."""
        self._round += 1

    def assigned(self, group: Any, works: Sequence[Work], chosen: Assignment) -> None:
        """Records the owner ranks of tensors, and the work on each."""
        self._owners.append((group, works, chosen))

    def exchanged(self, group: Any, schedule: Schedule, device: str) -> None:
        """Records that arrays travel to their owner ranks, and results back, by a device of this type."""
        self._moved.append((group, schedule, device))

    def record(self) -> Communication:
        """The messages so far. RulecError before the first step."""
        if not self._begun:
            raise RulecError("communication() tells what the last step sent to other processes: take a step before")
        by_group: dict[NamedGroup, list[tuple[int, int, str]]] = {}
        for group, place, numbers, device in self._reduced:
            by_group.setdefault(group, []).append((place, numbers, device))
        by_owners: dict[tuple[NamedGroup, str], list[Schedule]] = {}
        for group, schedule, device in self._moved:
            by_owners.setdefault((group, device), []).append(schedule)
        return Communication(
            tuple(_reductions(group, messages) for group, messages in by_group.items()),
            tuple(self._exchange(*owners, moved) for owners, moved in by_owners.items()),
        )

    def _exchange(self, group: NamedGroup, device: str, schedules: Sequence[Schedule]) -> Exchange:
        size = group.size
        sent, between, work = np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size)
        teams: list[tuple[int, ...]] = []
        for works, chosen in [(works, chosen) for other, works, chosen in self._owners if other == group]:
            teams += chosen.owners
            work += chosen.load(works, size)
        for schedule in schedules:
            sent += schedule.sent(size)
            between += schedule.between(size)
        matrices = np.bincount([rank for team in teams for rank in team], minlength=size)
        least, buckets = sum(s.least for s in schedules), sum(len(s.buckets) for s in schedules)
        dtypes = dict.fromkeys(dtype for s in schedules for x in s.loads for _, dtype in (*x.there, *x.back))
        shares = work / (work.sum() or 1.0)
        return Exchange(
            group.label, ", ".join(dtypes), group.rank, len(teams), tuple(matrices.tolist()), tuple(shares.tolist()),
            tuple(sent.tolist()), least, buckets, sum(len(team) > 1 for team in teams),
            sum(s.exchanges for s in schedules), tuple(between.tolist()), device,
        )  # fmt: skip


def _reductions(group: NamedGroup, messages: Sequence[tuple[int, int, str]]) -> Reductions:
    places, counts, devices = zip(*messages, strict=True)
    numbers = sum(counts)
    by = " and ".join(sorted({*devices}, key=lambda kind: (kind == "cpu", kind)))
    return Reductions(group.label, len({*places}), numbers, numbers * _NUMBER, by)


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns to the right of the first one are flush right, and numbers have thousands."""
    lines = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
