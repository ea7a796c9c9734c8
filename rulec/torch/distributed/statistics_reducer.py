"""The reduction of a step's statistics over shards: one message to the ranks of a mesh, after the step is written.

A step leaves the reductions of local shards. All of them travel in one sum: a maximum or minimum has a number for each
rank there, zero except that of its rank. Nobody waits for the message but a reader of the statistics. Its words say
which ranks sent other reductions, or took no step, and then the reader raises an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rulec.array_api.reductions import REDUCTIONS
from rulec.errors import RulecError
from rulec.language.expr.node import Op
from rulec.runtime.buckets.launch import LaunchStatistics
from rulec.runtime.statistics import Statistics
from rulec.torch.distributed.mesh import MeshGroup, ShardRanks, shard_ranks_of
from rulec.torch.distributed.traffic import Traffic
from rulec.torch.tensors.fake import is_fake

#: The words of a message: ranks, those that took no step, those with other reductions than before; then, with its
#: square, each of the number of the step and two parts of the digest of the reductions.
_WORDS = 9

_PART = 14

_AMONG = {Op.MAX: torch.amax, Op.MIN: torch.amin}


@dataclass(frozen=True, eq=False)
class _Row:
    """One reduction of a portion in a message: its number among the portions, its name, and its sharded tensors.

    `places` are their indices, None for all. `counted` is true for shards whose sums this rank sends, None for all.
    """

    portion: int
    name: str
    op: Op
    count: int
    places: Tensor | None
    counted: Tensor | None

    def sent(self, numbers: Any, rank_group: MeshGroup) -> Tensor:
        """The numbers of this rank in a message."""
        here = torch.as_tensor(numbers).to(torch.float64).reshape(-1)
        if self.places is not None:
            here = here[self.places.to(here.device)]
        if self.op is Op.SUM:
            return here if self.counted is None else torch.where(self.counted.to(here.device), here, 0.0)
        slots = here.new_zeros(rank_group.size, self.count)
        slots[rank_group.rank] = here
        return slots.reshape(-1)

    def length(self, rank_group: MeshGroup) -> int:
        """The number of its numbers in a message."""
        return self.count if self.op is Op.SUM else self.count * rank_group.size

    def received(self, part: Tensor, numbers: Any) -> Any:
        """The reductions of whole tensors, in an array like `numbers`, the local ones."""
        whole = part if self.op is Op.SUM else _AMONG[self.op](part.reshape(-1, self.count), 0)
        if self.places is not None:
            every = torch.as_tensor(numbers).to(whole).reshape(-1).clone()
            every[self.places.to(every.device)] = whole
            whole = every
        return whole.to(numbers.device) if isinstance(numbers, Tensor) else whole.cpu().numpy()


@dataclass(frozen=True)
class _Layout:
    """The rows of a message to a group, its numbers beside the words, and a digest that is the same in all ranks."""

    rank_group: MeshGroup
    rows: Sequence[_Row]
    length: int
    digest: int


class _Message:
    """A message on its way, and the problem that this rank knows of already."""

    def __init__(self, layout: _Layout, sent: Any, problem: str = "") -> None:
        self._layout, self._sent, self._problem = layout, sent, problem
        self._parts: list[Tensor] = []

    def wait(self) -> None:
        """Waits until the message has arrived."""
        if self._sent is not None:
            self._sent.wait()

    def parts(self) -> list[Tensor]:
        """The numbers of each row; RulecError where they are not those of one step of all ranks."""
        if not self._parts:
            self.wait()
            problem = self._problem or _problem_of(self._sent.result[:_WORDS].tolist())
            if problem:
                raise RulecError(problem)
            lengths = [row.length(self._layout.rank_group) for row in self._layout.rows]
            self._parts = [*self._sent.result[_WORDS:].split(lengths)]
        return self._parts


class _Whole(Mapping[str, Any]):
    """The reductions of a portion by name, over whole tensors, once somebody reads them."""

    def __init__(self, local: Mapping[str, Any]) -> None:
        self._local = local
        self._rows: dict[str, list[tuple[_Message, int, _Row]]] = {}

    def add(self, message: _Message, number: int, row: _Row) -> None:
        """Notes where the numbers of a row will be."""
        self._rows.setdefault(row.name, []).append((message, number, row))

    def __getitem__(self, name: str) -> Any:
        numbers = self._local[name]
        for message, number, row in self._rows.get(name, ()):
            numbers = row.received(message.parts()[number], numbers)
        return numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._local)

    def __len__(self) -> int:
        return len(self._local)


class StatisticsReducer:
    """Completes the statistics of steps over the ranks with other shards of the same tensors.

    Each step with statistics sends one message to each group of ranks, taken or not. If the reductions are others
    than in the last one, all ranks say so in a message before it.
    """

    def __init__(self) -> None:
        #: The digest and the length of the last message to each group.
        self._expected: dict[MeshGroup, tuple[int, int]] = {}
        self.rank_groups: list[MeshGroup] = []
        self.traffic = Traffic()
        self._open = False
        self._on_their_way: list[_Message] = []
        self._refused: list[tuple[MeshGroup, Any]] = []
        self._behind = False
        #: The layouts of the last messages, and the objects from which they follow.
        self._layouts: dict[MeshGroup, _Layout] = {}
        self._like: tuple[Any, ...] = ()

    def __reduce__(self) -> Any:
        raise RulecError("an optimizer of DTensors belongs to its processes: copy its state_dict() instead")

    def open(self, measures: bool = False) -> None:
        """Opens a step, which sends statistics where it `measures` them."""
        self._open = measures
        self.traffic.begin()

    def check_even(self) -> None:
        """RulecError where other ranks have taken a step that this rank did not take."""
        for _, sent in self._refused:
            sent.wait()
            ranks, failed = sent.result[:2].tolist()
            self._behind = self._behind or failed < ranks
        self._refused = []
        if self._behind:
            raise RulecError(
                "this process failed in a step with statistics that others took: load a checkpoint in every process"
            )

    def restore(self) -> None:
        """Records that a checkpoint was loaded."""
        self._behind, self._refused = False, []

    def refuse(self, waits: bool = True) -> None:
        """Tells the readers of other ranks that this rank takes no step. The message is waited for in the next step."""
        if not self._open:
            return
        self._open = False
        for rank_group in self.rank_groups:
            digest, length = self._expected.get(rank_group, (0, 0))
            self._refused.append((rank_group, self._start_reduce(rank_group, _words(0, digest, failed=1), length)))

    def send(self, step: int, engines: Sequence[Statistics], ranks: Mapping[int, ShardRanks]) -> None:
        """Sends the reductions of this step, as its engines have left them, to be completed for their reader.

        `ranks` has the ranks with shards of each tensor, by the identity of the engine's tensor.
        """
        if not self._open:
            return
        self._open = False
        launches = [launch for each in engines for launch in each.launches]
        portions = [known for launch in launches for known in launch]
        self._follow(portions, ranks)
        for message in self._on_their_way:
            message.wait()
        self._on_their_way = []
        whole = [_Whole(known.reduced) for known in portions]
        for rank_group in self.rank_groups:
            layout = self._layouts[rank_group]
            message = self._sent(layout, step, portions)
            self._on_their_way.append(message)
            for number, row in enumerate(layout.rows):
                whole[row.portion].add(message, number, row)
        left = iter(replace(known, stages=[each]) for known, each in zip(portions, whole, strict=True))
        for launch in launches:
            launch[:] = [next(left) for _ in launch]

    def _follow(self, portions: Sequence[LaunchStatistics], ranks: Mapping[int, ShardRanks]) -> None:
        """The layout of each group for these portions, as before where they are as before."""
        like = (*(known.version for known in portions), *(t for known in portions for t in known.tensors))
        same = len(like) == len(self._like) and all(a is b for a, b in zip(like, self._like, strict=True))
        if not same or [*self._layouts] != self.rank_groups:
            self._like = like
            self._layouts = {rank_group: _layout(rank_group, portions, ranks) for rank_group in self.rank_groups}

    def _sent(self, layout: _Layout, step: int, portions: Sequence[LaunchStatistics]) -> _Message:
        """The message of this step to a group, on its way."""
        rank_group, digest, length = layout.rank_group, layout.digest, layout.length
        if self._expected.get(rank_group) != (digest, length):
            problem = self._changed(rank_group, step, digest)
            if problem:
                return _Message(layout, None, problem)
            self._expected[rank_group] = digest, length
        numbers = [row.sent(portions[row.portion].reduced[row.name], rank_group) for row in layout.rows]
        return _Message(layout, self._start_reduce(rank_group, _words(step, digest), length, numbers))

    def _changed(self, rank_group: MeshGroup, step: int, digest: int) -> str:
        """Tells the ranks that the reductions are others than before. Returns why they do not all have the same."""
        sent = self._start_reduce(
            rank_group, _words(step, digest, changed=1), self._expected.get(rank_group, (0, 0))[1]
        )
        sent.wait()
        ranks, failed, changed, *sums = sent.result[:_WORDS].tolist()
        return _problem_of([ranks, failed, 0 if changed == ranks else changed, *sums])

    def _start_reduce(
        self, rank_group: MeshGroup, words: Sequence[float], length: int, numbers: Sequence[Tensor] = ()
    ) -> Any:
        """Sends words, and numbers, zeros by default."""
        device = rank_group.device()
        self.traffic.reduced(rank_group, len(words) + length, device.type)
        self.traffic.end_round()
        first = torch.tensor(words, dtype=torch.float64, device=device)
        rest = [part.to(device) for part in numbers] or [first.new_zeros(length)]
        return rank_group.start_reduce(Op.SUM, torch.cat([first, *rest]))


def reducer_of(params: Sequence[Any], before: StatisticsReducer | None) -> StatisticsReducer | None:
    """The reducer for sharded parameters: `before`, or new ones; None where no parameter is sharded."""
    groups = [*dict.fromkeys(each.rank_group for each in shard_ranks_of(params).values())]
    if any(map(is_fake, params)) or not groups:
        return None
    reducer = before or StatisticsReducer()
    reducer.rank_groups = groups
    return reducer


def _rows(
    rank_group: MeshGroup, portions: Sequence[LaunchStatistics], ranks: Mapping[int, ShardRanks]
) -> Iterator[_Row]:  # fmt: skip
    """The reductions of local shards that statistics wait for, of the tensors of one group."""
    for number, known in enumerate(portions):
        every = [ranks.get(id(tensor)) for tensor in known.tensors]
        places = [i for i, each in enumerate(every) if each is not None and each.rank_group == rank_group]
        if not places:
            continue
        counted = [each.first for each in every if each is not None and each.rank_group == rank_group]
        row = partial(
            _Row, count=len(places), places=torch.tensor(places) if len(places) < len(every) else None,
            counted=None if all(counted) else torch.tensor(counted),
        )  # fmt: skip
        program, unread = known.version.program, known.version.plan.unread
        for result in (r for stage in program.stages for r in stage.reduces if r.name in unread):
            assert result.value.op in REDUCTIONS
            yield row(number, result.name, result.value.op)


def _layout(
    rank_group: MeshGroup, portions: Sequence[LaunchStatistics], ranks: Mapping[int, ShardRanks]
) -> _Layout:  # fmt: skip
    told = {}
    for row in _rows(rank_group, portions, ranks):
        known = portions[row.portion]
        numbers = [t.number for t in known.tensors if id(t) in ranks and ranks[id(t)].rank_group == rank_group]
        told[row] = numbers, row.name, row.op.name, known.version.program.name
    rows = sorted(told, key=told.__getitem__)  # updates inside a backward pass have another order in each rank
    digest = zlib.crc32(repr([told[row] for row in rows]).encode()) & ((1 << 2 * _PART) - 1)
    return _Layout(rank_group, rows, sum(row.length(rank_group) for row in rows), digest)


def _words(step: int, digest: int, failed: int = 0, changed: int = 0) -> list[float]:
    parts = (step, digest >> _PART, digest & ((1 << _PART) - 1))
    return [1.0, float(failed), float(changed), *(float(x) for part in parts for x in (part, part * part))]


def _problem_of(words: Sequence[float]) -> str:
    """Why the numbers of a message are not those of one step of all ranks; empty where they are."""
    ranks, failed, changed, *sums = words
    if failed:
        return "another process took no step, for an error of its own: see there; this step has no statistics"
    if changed or any(ranks * square != total**2 for total, square in zip(sums[::2], sums[1::2], strict=True)):
        return (
            "the processes measured statistics of other tensors, or in other steps: give every process the gradients "
            "of the same tensors; this step has no statistics"
        )
    return ""
