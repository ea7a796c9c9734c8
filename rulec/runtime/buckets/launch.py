"""Launches: one bucket's share of a step, checked and ready to be written.

`Part` is a set of a bucket's tensors that fire together; it is kept and used again in many steps.
"""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from rulec.array_api.library import Library
from rulec.backend.protocol import Rows
from rulec.compiler.ir import Program
from rulec.errors import BackendUnsupported, TensorError
from rulec.kernel.multi_tensor.address import chosen
from rulec.language.expr.node import Kind, Node, Op
from rulec.language.statistics import PREFIX, Watched
from rulec.runtime.arrays import Arrays
from rulec.runtime.buckets.bucket import Bucket, Tensor, Version
from rulec.runtime.buckets.context import EngineContext
from rulec.runtime.buckets.flat import Remembered, sets_of
from rulec.runtime.buckets.reductions import Join, Joining, LaunchShare, Processes, Waits
from rulec.runtime.buckets.scalar_table import Numbers
from rulec.runtime.distributed.owners import Work
from rulec.runtime.distributed.process_group import RankGroup

Places = np.ndarray[Any, np.dtype[np.int64]]

#: From the matrices `(batch, rows, cols)` of tensors and their number to the number of tensors in one stack.
StackSize = Callable[[tuple[int, int, int], int], int]

#: Tensors with scratch of more elements than this in total are updated one portion after the other.
LARGE = 1 << 22


def fact_of(tensors: Sequence[Tensor], name: str, library: Library) -> Any:
    """A shape fact of each tensor, in float64."""
    return library.numbers(np.array([tensor.facts[name] for tensor in tensors], np.float64))


class Portion:
    """Tensors of a part that go through all stages of a step together.

    `places` are their indices in the part, None for all; `positions` are their indices in the bucket.
    """

    def __init__(self, part: Part, places: list[int] | None) -> None:
        self.bucket, self.places = part.bucket, places
        all_positions = part.positions if part.positions is not None else range(len(part.bucket.tensors))
        self.positions = [*all_positions] if places is None else [all_positions[i] for i in places]
        self.fired = part.positions if places is None else self.positions
        self.at = np.array(self.positions, np.int64)
        self.groups = part.bucket.groups[self.at]
        #: A slice of everything where these are all tensors of the bucket, in order, else None.
        self.whole = slice(None) if self.fired is None else None
        #: The owners' work on the global tensor of each shard, by the plan and the numbers that it follows from.
        self.works: dict[Any, Sequence[Work]] = {}
        self._sets: dict[int, list[list[int]]] = {}
        self._facts: dict[str, Any] = {}
        self._parted: dict[frozenset[str], list[tuple[tuple[RankGroup, ...], Places]]] = {}

    def __len__(self) -> int:
        return len(self.positions)

    def pick(self, items: Sequence[Any]) -> Sequence[Any]:
        """The items of these tensors, from items for all tensors of the part."""
        return items if self.places is None else chosen(items, self.places)

    def parted(self, axes: frozenset[str]) -> list[tuple[tuple[RankGroup, ...], Places]]:
        """The indices of sharded tensors, by the rank groups to complete a reduction without these axes."""
        if axes not in self._parted:
            by_group: dict[tuple[RankGroup, ...], list[int]] = {}
            for place, tensor in enumerate(self.tensors):
                if rank_groups := tensor.beyond(axes):
                    by_group.setdefault(rank_groups, []).append(place)
            self._parted[axes] = [(rank_groups, np.array(places)) for rank_groups, places in by_group.items()]
        return self._parted[axes]

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors."""
        return [self.bucket.tensors[i] for i in self.positions]

    @property
    def remembered(self) -> Remembered | None:
        """The memory of steps of these tensors; None where each tensor's vectors are computed on their own."""
        bucket = self.bucket
        if not bucket.library.flattens:
            return None
        return bucket.sets.of(self.fired, len(bucket.tensors), self._new_memory)

    def _new_memory(self) -> Remembered:
        return Remembered([(t.view.batch, t.view.rows, t.view.cols) for t in self.tensors], self.bucket.library)

    def fact(self, name: str) -> Any:
        """A shape fact of each tensor, in memory that stays."""
        if name not in self._facts:
            self._facts[name] = fact_of(self.tensors, name, self.bucket.library)
        return self._facts[name]

    def sets(self, small: int) -> list[list[int]]:
        """The indices of tensors whose matrices, of at most `small` elements, are one stack between stages."""
        if small not in self._sets:
            self._sets[small] = sets_of([tensor.view for tensor in self.tensors], small)
        return self._sets[small]

    @property
    def states(self) -> list[dict[str, Any]]:
        """The states of each tensor."""
        return [self.bucket.states[i] for i in self.positions]

    @cached_property
    def index(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The row of each tensor of the bucket in a table with one row for each tensor of the portion."""
        index = np.zeros(len(self.bucket.tensors), np.int64)
        index[self.at] = np.arange(len(self.at))
        return index


@dataclass
class Part:
    """The tensors of one bucket that fire together.

    `positions` are their indices in the bucket, None for all of it in order. `pick` selects their gradients from the
    gradients of the whole step; None for all of them. `check` checks gradients and makes them readable for kernels.
    `measuring` is the same part under a program with statistics, once there is one.
    """

    bucket: Bucket
    positions: list[int] | None
    fired: Any
    pick: Callable[[Sequence[Any]], Sequence[Any]] | None
    check: Callable[[Sequence[Any]], Sequence[Any]]
    _portions: dict[Any, list[Portion]] = field(default_factory=dict, repr=False)
    measuring: Part | None = field(default=None, repr=False)

    def measured(self, watch: Watched) -> Part:
        """The same tensors, in a bucket under a program with these statistics; itself where there are none."""
        if not watch:
            return self
        bucket = self.bucket.measured(watch)
        if self.measuring is None or self.measuring.bucket is not bucket:
            self.measuring = replace(self, bucket=bucket, _portions={}, measuring=None)
        return self.measuring

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that fire."""
        return self.bucket.tensors if self.positions is None else [self.bucket.tensors[i] for i in self.positions]

    def portions(self, most: int | None, stack_size: StackSize | None = None) -> list[Portion]:
        """The tensors as one portion, or as several of at most so many elements, or of one tensor.

        With `stack_size`, tensors of one stack are in one portion, and follow one another.
        """
        portions = self._portions.get((most, stack_size is None))
        if portions is None:
            cuts = [None] if most is None else [*self._cut(most, self._sets(stack_size))]
            portions = [Portion(self, None if len(cuts) == 1 else places) for places in cuts]
            self._portions[most, stack_size is None] = portions
        return portions

    def _sets(self, stack_size: StackSize | None) -> Iterator[list[int]]:
        """The indices of tensors that are not sharded."""
        tensors = self.tensors
        if stack_size is None:
            yield from ([place] for place in range(len(tensors)))
            return
        alike: dict[tuple[int, int, int], list[int]] = {}
        for place, tensor in enumerate(tensors):
            alike.setdefault((tensor.view.batch, tensor.view.rows, tensor.view.cols), []).append(place)
        for shape, places in sorted(alike.items()):
            count = stack_size(shape, len(places))
            yield from (places[k : k + count] for k in range(0, len(places), count))

    def _cut(self, most: int, sets: Iterator[list[int]]) -> Iterator[list[int]]:
        tensors = self.tensors
        portion: list[int] = []
        size = 0
        for places in sets:
            more = sum(tensors[place].numel for place in places)
            if portion and size + more > most:
                yield portion
                portion, size = [], 0
            portion += places
            size += more
        yield portion


#: The number of remembered sets of tensors.
_SETS = 1024


class Partitions:
    """The parts of sets of tensors, by their ids.

    `known` has the sets seen since tensors last moved, or joined buckets.
    """

    def __init__(self, tensors: Sequence[Tensor], arrays: Arrays) -> None:
        self._tensors, self._arrays = tensors, arrays
        self.known: dict[tuple[int, ...], list[Part]] = {}

    def forget(self) -> None:
        """Forgets all parts, because tensors moved or joined buckets."""
        self.known = {}

    def of(self, ids: Sequence[int]) -> list[Part]:
        """The parts of a set of tensors, all in buckets."""
        return self.known.get(tuple(ids)) or self.cut(tuple(ids))

    def cut(self, ids: tuple[int, ...]) -> list[Part]:
        """The parts of a new set of tensors, all in buckets; TensorError for a tensor named twice."""
        if len(self.known) >= _SETS:
            self.known.clear()
        places: dict[int, list[int]] = {}
        for place, i in enumerate(ids):
            places.setdefault(id(self._tensors[i].bucket), []).append(place)
        parts = [self._part([self._tensors[ids[p]] for p in at], at, len(ids)) for at in places.values()]
        self.known[ids] = parts
        return parts

    def _part(self, tensors: list[Tensor], places: list[int], total: int) -> Part:
        home = tensors[0].bucket
        assert home is not None
        bucket = home.moved or home
        positions = [t.position for t in tensors]
        if len(set(positions)) != len(positions):
            raise TensorError("a tensor is updated twice in one call: give each its whole gradient once")
        names = [t.name for t in tensors]
        check = self._arrays.gradient_check([t.array for t in tensors], bucket.layout.dtype("g"), names)
        pick: Callable[[Sequence[Any]], Sequence[Any]] | None = None
        if len(places) != total:
            pick = lambda arrays: chosen(arrays, places)  # noqa: E731
        if positions == list(range(len(bucket.tensors))):
            return Part(bucket, None, None, pick, check)
        return Part(bucket, positions, np.array(positions), pick, check)


@dataclass(frozen=True)
class LaunchStatistics:
    """The statistics of the tensors of a portion, by name, of one step of a program.

    A value is a number for all tensors, an array with one for each, or a sequence of arrays, one for each tensor, as
    the `library` of its device has them. `skip_mask` is true for a tensor that skipped the step; None where none did.
    `left` has the operands of statistics that nobody asked for so far, and `stages` the reductions of each stage. The
    reductions of a shard are local, except the step's own, which come first. `owner` has the ranks of the engine. A
    step of one kernel call leaves no operands: `table` gives the scalar table of the last such step, and `index` has
    each tensor's row.
    """

    version: Version
    tensors: Sequence[Tensor]
    library: Library
    owner: Processes
    values: Mapping[str, Any]
    skip_mask: Any = None
    left: Mapping[Node, Any] = field(default_factory=dict)
    stages: Sequence[Mapping[str, Any]] = ()
    index: Places | None = None
    table: Callable[[], Numbers] | None = None

    @cached_property
    def reduced(self) -> Mapping[str, Any]:
        """The reductions of all stages, by name."""
        return ChainMap(*self.stages)  # type: ignore[arg-type]

    def all_values(self) -> Generator[Join, Any, dict[str, Any]]:
        """All statistics, by name; the last of them are computed now. Yields where they are of several launches."""
        plan, known = self.version.plan, dict(self.left)
        for value in plan.later:
            if value.op.kind is Kind.REDUCE:
                known[value] = yield self._join(value, known[value.args[0]])
            elif value not in known:
                known[value] = self._computed(value, known)
        asked = {s.buffer.removeprefix(PREFIX): known[s.value] for s in plan.asked}
        order = [name for name, _ in self.version.program.watch]
        by_name = {**self.values, **asked}
        return {name: by_name[name] for name in order if name in by_name}

    def _computed(self, value: Node, known: Mapping[Node, Any]) -> Any:
        if value.op is Op.CONST:
            return self.library.constant(float(value.arg))  # type: ignore[arg-type]
        if value.op is Op.RESULT:
            return self.reduced[str(value.arg)]
        if value.op is Op.FACT:
            return fact_of(self.tensors, str(value.arg), self.library)
        if value.op is Op.SCALAR:
            assert self.table is not None
            assert self.index is not None
            return self.library.numbers(self.table()[self.index, int(value.arg)])  # type: ignore[call-overload]
        with np.errstate(all="ignore"):
            return self.library.arithmetic[value.op](*(known[a] for a in value.args))

    def _join(self, value: Node, operand: Any) -> Join:
        """A reduction over tensors of numbers of these tensors, or of their groups."""
        library, plan = self.library, self.version.plan
        numbers = library.spread(library.cast(operand, "float64"), (len(self.tensors),))
        groups = np.array([tensor.group for tensor in self.tensors])
        per_group = "n" not in plan.axes[value.args[0]].letters
        if per_group:
            groups, first = np.unique(groups, return_index=True)
            numbers = library.take(numbers, first)
        site = self.version.program.sites[value]
        return Join(site, value.op, str(value.arg), numbers, groups, library, per_group, self.owner)


class Transfers(Protocol):
    """Brings the arrays of launches, which lie elsewhere between steps, to where kernels read and write them."""

    def bring(self, launch: Launch, stage: int | None = None, buffers: Sequence[str] = ()) -> None:
        """Has the arrays of a stage of a launch, or those in `buffers` between its stages, where they are expected.

        Does nothing where they are there.
        """

    def take_back(self, launch: Launch, done: bool) -> None:
        """Lets the arrays of a launch go: it is `done`, or waits for values of other launches.

        It may have run its last stage in both cases.
        """


@dataclass(slots=True)
class Launch:
    """One bucket's share of a step: nothing of it has been written yet.

    `scalar_states` are new values of states that follow from hyper-parameters and `t`, for each fired tensor. `inputs`
    has, by name, a number or one array for each fired tensor. During the run, `wrote` is True once something may be
    written, `ran` is the last stage that has run, and `skipped` gets the names of skipped tensors. `transfers` brings
    arrays that lie elsewhere; None where all are where kernels expect them. `share` is its place in a larger launch;
    None where it is no part of one. `begun` is a run that began before its step, with its wait.
    """

    common: EngineContext
    part: Part
    version: Version
    grads: Sequence[Any]
    rows: Rows
    scalar_states: Mapping[str, Numbers]
    inputs: Mapping[str, Any]
    wrote: bool = False
    ran: int = -1
    skipped: list[str] = field(default_factory=list)
    #: The statistics of the portions that have run.
    statistics: list[LaunchStatistics] = field(default_factory=list)
    transfers: Transfers | None = None
    share: LaunchShare | None = None
    begun: tuple[Joining, Waits | None] | None = None

    def stop_turning(self) -> None:
        """Takes the version that copies the entries of histories, now and from now on."""
        if self.version.turns:
            self.part.bucket.stop_turning()
            self.version = self.part.bucket.version()

    @property
    def name(self) -> str:
        """The rule's name."""
        return self.version.program.name

    def leave(self, reduced: Mapping[str, Any]) -> None:
        """Leaves the reductions of a step of one kernel call for its statistics."""
        part, table = self.part, self.rows.table
        index = self.rows.index if part.positions is None else self.rows.index[part.fired]
        tensors = (
            part.bucket.tensors if part.positions is None else part.tensors
        )  # written out: a step counts its calls
        known = LaunchStatistics(
            self.version, tensors, part.bucket.library, self.common.processes, {}, stages=[reduced], index=index,
            table=lambda: table,
        )  # fmt: skip
        self.statistics += [known]

    def kernel(
        self, stage: int, rows: Rows, fired: Sequence[int] | None, grads: Sequence[Any], scratch: Any
    ) -> Mapping[str, Any]:
        """Runs a stage over the tensors at the positions `fired`, None for all. Its reductions, by name."""
        bucket, call = self.part.bucket, self.version.call
        assert call is not None
        if self.transfers is not None:
            self.transfers.bring(self, stage)
        written = call(stage, grads, rows, scratch, tensors=fired)
        self.ran = stage
        if written.params[0] is not bucket.params[0]:
            raise BackendUnsupported(bucket.backend.name, "an update in place of arrays of this kind", self.name)
        return written.reduced

    def count_levels(self) -> None:
        """Counts the step for groups and the model where this version of the program leaves their states alone.

        Another arm of a branch writes them; `t` of a group or the model counts steps, whatever arm they take.
        """
        bucket, fired = self.part.bucket, self.part.fired
        left = _left_alone(bucket.program, self.version.program)
        if left and len(self.skipped) < len(self.grads):
            self.common.shared.count(left, bucket.groups[slice(None) if fired is None else fired])

    def keep_number(self, state: str, fired: Any, values: Any, skip_mask: Any = None) -> None:
        """Keeps the new values of a scalar state, one for each tensor at the positions `fired`.

        A tensor's is written at once, a group's and the model's at the end of the step. On a device, `skip_mask` is
        true for tensors that keep the old value; on the host, `fired` leaves them out.
        """
        bucket = self.part.bucket
        on_device = bucket.is_on_device_only(state)
        if state not in bucket.scalar_states:
            library = bucket.library if on_device else self.common.host
            self.common.shared.keep(state, bucket.groups[fired], values, library, skip_mask)
            return
        numbers = bucket.scalar_states[state].numbers
        if not on_device:
            numbers[fired] = values
            return
        if skip_mask is not None:
            old = numbers if isinstance(fired, slice) else bucket.library.take(numbers, fired)
            values = bucket.library.arithmetic[Op.WHERE](skip_mask, old, values)
        bucket.library.put(numbers, fired, values)


@functools.cache
def _left_alone(whole: Program, version: Program) -> tuple[str, ...]:
    """The states of groups and the model that a program writes, and its version for some arms of branches does not."""
    written = {store.buffer for store in (*version.scalars.stores, *version.finish)}
    stores = (*whole.scalars.stores, *whole.finish)
    shared = [s.buffer for s in stores if whole.buffer(s.buffer).axes.letters in ("", "k")]
    return tuple(state for state in dict.fromkeys(shared) if state not in written)
