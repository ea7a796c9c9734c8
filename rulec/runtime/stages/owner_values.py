"""The values between the stages of a launch whose tensors are shards of matrices: owner ranks compute global matrices.

A tensor has the same owner in all gaps of a step. The owner keeps values that it needs again until the step is over.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rulec.array_api.newton_schulz import iterations
from rulec.language.expr.node import Node
from rulec.runtime.buckets.flat import sets_of
from rulec.runtime.buckets.plan import Gap
from rulec.runtime.buckets.reductions import Joining, Processes, Waits
from rulec.runtime.distributed.all_to_all import OwnerExchange, OwnerRequest, Payload, Task, Transfer
from rulec.runtime.distributed.owner_plan import OwnerPlan, OwnerTask
from rulec.runtime.distributed.owners import Share, Work
from rulec.runtime.distributed.process_group import RankGroup
from rulec.runtime.distributed.shards import ShardLayout
from rulec.runtime.stages.evaluate import GapEvaluator
from rulec.runtime.stages.kernel_arguments import KernelArguments
from rulec.runtime.stages.sources import Array


class OwnerSource:
    """The value source of an owner rank: some tensors of a portion, by their indices, as global tensors."""

    def __init__(self, parts: KernelArguments, places: Sequence[int], local: Mapping[Node, Any]) -> None:
        self._parts, self._places, self._local = parts, np.array(places, np.int64), local
        self.compute, self.seed, self.library = parts.compute, parts.seed, parts.library
        self.fill_noise, self.groups = parts.fill_noise, parts.groups[self._places]
        self.owner: Processes = parts.owner
        self.flats = None
        self.sets = sets_of([parts.shard_layout(i).whole for i in places], parts.small)

    def __len__(self) -> int:
        return len(self._places)

    def taken(self, numbers: Any) -> Any:
        """The numbers of these tensors, from the numbers of all tensors of the portion."""
        return self.library.take(numbers, self._places) if getattr(numbers, "ndim", 0) else numbers

    def column(self, index: int) -> Any:
        """A column of the scalar table, for each tensor or one for all."""
        return self.taken(self._parts.column(index))

    def fact(self, name: str) -> Any:
        """A shape fact, for each tensor."""
        return self.taken(self._parts.fact(name))

    def numbers(self, buffer: str) -> Any:
        """The value of a scalar buffer, for each tensor."""
        return self.taken(self._parts.numbers(buffer))

    def matrices(self, buffer: str, i: int) -> Array:
        """An input of a shape of its own, which every rank has; all other arrays arrive by all-to-all."""
        place = int(self._places[i])
        matrix = self._parts.part(buffer, place)
        matrices: Array = matrix.reshape(self._parts.shard_layout(place).whole.batch, *matrix.shape[-2:])
        return matrices

    def stacks_of(self, buffer: str, dtype: str | None = None) -> None:
        """Returns None: arrays arrive by all-to-all."""

    def stacked(self, buffer: str, places: Sequence[int]) -> Array:
        """Raises, as `matrices` does."""
        return self.matrices(buffer, places[0])

    def write_stack(self, buffer: str, places: Sequence[int], stack: Any) -> None:
        """Raises: owners write no states."""
        raise AssertionError(f"{buffer} of the tensors {places} is written by the ranks with its shards")

    def vectors_of(self, buffer: str) -> None:
        """Returns None: no vector lies in a flat array."""

    def room(self, i: int) -> int:
        """The bytes allowed for intermediate values."""
        return self._parts.room(int(self._places[i]))

    def facts(self, i: int) -> Mapping[str, float]:
        """The shape facts of a tensor."""
        return self._parts.facts(int(self._places[i]))

    def extents(self, i: int) -> tuple[int, int, int]:
        """The matrices of a global tensor, and their rows and columns."""
        return self._parts.shard_layout(int(self._places[i])).extents("bij")

    def hyper(self, i: int) -> Mapping[str, float]:
        """The hyper-parameters of a tensor."""
        return self._parts.hyper(int(self._places[i]))

    def tensor_number(self, i: int) -> int:
        """The number that makes a tensor's random numbers different from other tensors'."""
        return self._parts.tensor_number(int(self._places[i]))

    def known(self, value: Node, numbers: Any, i: int) -> Any:
        """The number of a tensor; a Python number where the host knows it."""
        if value in self._local:
            return self._parts.known(value, self._local[value], int(self._places[i]))
        return self.library.at(numbers, i)

    def parted(self, axes: frozenset[str]) -> list[tuple[tuple[RankGroup, ...], Array]]:
        """Returns no rank groups: an owner has global tensors, so its reductions are complete."""
        return []

    def places(self, i: int) -> None:
        """None: all of a matrix is here."""

    def lines(self, i: int) -> None:
        """Returns None: an owner has all rows and columns."""


@dataclass
class OwnerEvaluator(GapEvaluator):
    """Computes the values of a launch with sharded tensors: of local shards, and of the tensors owned by this rank.

    `remembered` has, for each owned tensor by its index in the portion, the values for later gaps.
    `within_each` has reductions within tensors that owners computed, before they are reduced over tensors.
    """

    shard_layout: list[ShardLayout] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    remembered: dict[int, dict[Node, Any]] = field(default_factory=dict)
    within_each: dict[Node, Any] = field(default_factory=dict)

    @property
    def parts(self) -> KernelArguments:
        """The value source of the local shards."""
        assert isinstance(self.source, KernelArguments)
        return self.source

    @property
    def owner_plan(self) -> OwnerPlan:
        """The plan of the values that owners compute."""
        assert self.plan.owner_plan is not None
        return self.plan.owner_plan

    def begin(self) -> Joining:
        """Asks for the owner ranks of the tensors, and waits for them."""
        self.shard_layout = [self.parts.shard_layout(i) for i in range(self.count)]
        if not self.owner_plan.whole:
            return
        tensors = self.parts.portion.tensors
        each_tensor = zip(self.shard_layout, self._works(), tensors, strict=True)
        self.tasks = [Task(half.spread, work, name=tensor.name) for half, work, tensor in each_tensor]
        yield OwnerRequest(self.tasks)
        each = zip(self.tasks, self.shard_layout, strict=True)
        self.shard_layout = [half if task.spread is half.spread else half.alone for task, half in each]
        self.remembered = {i: {} for i, task in enumerate(self.tasks) if task.here}

    def _works(self) -> Sequence[Work]:
        """The work on each tensor, kept as long as the hyper-parameters that it follows from stay the same."""
        parts, owner_plan = self.parts, self.owner_plan
        named, names = parts.launch.common.hyper.named, owner_plan.hyper_names
        numbers = tuple([tuple(named[name][parts.groups].tolist()) for name in names if name in named])
        key, kept = (owner_plan, numbers), parts.portion.works
        if key not in kept:
            kept[key] = [
                owner_plan.work(parts.facts(i), parts.hyper(i), half.whole, parts.layout)
                for i, half in enumerate(self.shard_layout)
            ]
        return kept[key]

    def _share(self, value: Node, i: int) -> Share | None:
        """The share of an owner of tensor i in `newton_schulz`, where it has several."""
        share = self.tasks[i].work.share
        if share is None or len(self.tasks[i].owners) == 1:
            return None
        steps = value.args[1]
        return replace(share, steps=iterations(self.parts.known(steps, self.values[steps], i)))

    def work_out(self, gap: Gap) -> Joining:
        """Computes the values of a gap."""
        for owner_task in gap.owner_plan:
            yield from self.each(owner_task.local, {})
            if owner_task.sent or owner_task.returned:
                yield from self._exchange(owner_task)
            elif owner_task.whole:
                self._worked(owner_task, dict.fromkeys(self.remembered, ()))  # nobody waits for it
            for value in owner_task.over:
                self.values.pop(value, None)

    def _exchange(self, owner_task: OwnerTask) -> Joining:
        """Has owner ranks compute a task, by an all-to-all to them and one back."""
        transfers = [
            Transfer(
                self.tasks[i], [self._sent(value, i) for value in owner_task.sent],
                [self._parcel(value, i) for value in owner_task.returned],
                self._share(owner_task.whole[0], i) if owner_task.whole else None, self.shard_layout[i].long,
            )
            for i in range(self.count)
        ]  # fmt: skip
        parts = yield OwnerExchange(transfers, self.library, lambda arrays: self._worked(owner_task, arrays))
        for k, value in enumerate(owner_task.returned):
            self._take(value, [each[k] for each in parts])

    # Payloads

    def _sent(self, value: Node, i: int) -> Payload:
        """The payload with the local shard of a value or state that the owner of tensor i needs."""
        if self.owner_plan.is_factor(value):
            return self._parcel(value, i, self.parts.part(str(value.arg), i))
        letters, half, x = self.axes(value).letters, self.shard_layout[i], self.values[value][i]
        if tuple(x.shape) != (extents := half.extents(letters, whole=False)):
            x = self.library.spread(x, extents)  # a draw is kept once for all matrices
        return self._parcel(value, i, half.tensor(x, letters, whole=False))

    def _parcel(self, value: Node, i: int, elements: Any = None) -> Payload:
        half = self.shard_layout[i]
        if self.owner_plan.is_factor(value):
            name = self.owner_plan.stored_in(value)
            return Payload(half.state(name), half.shapes[name], *self._dtypes(value), elements)
        letters = self.axes(value).letters
        return Payload(half.along(letters), half.sides(letters), *self._dtypes(value), elements)

    def _dtypes(self, value: Node) -> tuple[str, str]:
        return self.owner_plan.dtypes(value, self.parts.layout, self.parts.scaled)

    def _take(self, value: Node, parts: Sequence[Any]) -> None:
        """Keeps the local shards of a result. A state of a shape of its own keeps the shape of its shard."""
        if value not in self.owner_plan.whole:
            self.within_each[value] = self.library.together(parts)
        elif self.is_number(value):
            self.values[value] = self.library.together(parts)
        elif self.owner_plan.is_factor(value):
            self.values[value] = [*parts]
        else:
            letters = self.axes(value).letters
            self.values[value] = [
                half.matrices(part, letters, whole=False) for half, part in zip(self.shard_layout, parts, strict=True)
            ]

    # At the owner

    def _worked(self, owner_task: OwnerTask, arrays: Mapping[int, Sequence[Any]]) -> Mapping[int, Sequence[Any]]:
        """The results for owned tensors, by their indices, from the arrays that other ranks sent for them."""
        places = [*arrays]
        if not places:
            return {}
        source = OwnerSource(self.parts, places, self.values)
        owner = GapEvaluator(self.plan, source, self._recalled(places))
        for k, value in enumerate(owner_task.sent):
            owner.values[value] = [self._matrices_of(value, i, arrays[i][k]) for i in places]
        for value in owner_task.whole:
            for operand in value.args:
                if self.is_number(operand) and operand not in owner.values:
                    owner.values[operand] = source.taken(self.values[operand])
            if value not in owner.values:
                _finished(owner.each([value], owner_task.done))
        results = [self._results(value, places, owner) for value in owner_task.returned]
        self._remember(places, owner, {*owner_task.gone})
        return {i: [each[k] for each in results] for k, i in enumerate(places)}

    def _matrices_of(self, value: Node, i: int, array: Any) -> Any:
        half = self.shard_layout[i]
        if self.owner_plan.is_factor(value):
            return array.reshape(half.whole.batch, *array.shape[-2:])
        return half.matrices(array, self.axes(value).letters, whole=True)

    def _results(self, value: Node, places: Sequence[int], owner: GapEvaluator) -> list[Any]:
        """A result for each of some tensors, in the shape in which it travels."""
        whole = owner.values[value] if value in self.owner_plan.whole else _finished(owner.within([value]))[0]
        shard_layout = [self.shard_layout[i] for i in places]
        if self.is_number(value):
            numbers = self.library.spread(self.library.cast(self.library.numbers(whole), "float64"), (len(places),))
            return [numbers[k : k + 1].reshape(half.sides("")) for k, half in enumerate(shard_layout)]
        if self.owner_plan.is_factor(value):
            shapes = [half.shapes[self.owner_plan.stored_in(value)] for half in shard_layout]
            extents = [(half.whole.batch, *shape[-2:]) for half, shape in zip(shard_layout, shapes, strict=True)]
            each = zip(whole, extents, shapes, strict=True)
            return [self.library.spread(x, extent).reshape(shape) for x, extent, shape in each]
        letters = self.axes(value).letters
        return [
            half.tensor(self.library.spread(x, half.extents(letters)), letters, whole=True)
            for x, half in zip(whole, shard_layout, strict=True)
        ]

    def _recalled(self, places: Sequence[int]) -> dict[Node, Any]:
        """The remembered values of some tensors."""
        values = {value: [self.remembered[i][value] for i in places] for value in self.remembered[places[0]]}
        return {v: self.library.join(x, 0) if self.is_number(v) else x for v, x in values.items()}

    def _remember(self, places: Sequence[int], owner: GapEvaluator, gone: set[Node]) -> None:
        """Remembers the values of each tensor that its owner needs again."""
        again = [v for v in owner.values if v not in gone and (v in self.owner_plan.whole or not self.is_number(v))]
        for k, i in enumerate(places):
            self.remembered[i] = {
                v: owner.values[v][k : k + 1] if self.is_number(v) else owner.values[v][k] for v in again
            }

    # On every rank

    def reduced_here(self, value: Node) -> tuple[Any, frozenset[str]]:
        """A reduction within the local shard of each tensor; that of a global tensor where its owner computed it."""
        if value in self.within_each:
            return self.within_each.pop(value), frozenset()
        return super().reduced_here(value)


def _finished(work: Generator[Waits, Any, Any]) -> Any:
    """The result of a generator that never waits."""
    try:
        next(work)
    except StopIteration as end:
        return end.value
    raise AssertionError("an owner has all that it needs")
