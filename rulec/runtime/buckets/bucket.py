"""Tensors and the buckets they are in."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from rulec.array_api.bits import words_of
from rulec.array_api.library import Library
from rulec.array_api.slices import Runs, runs_of
from rulec.backend.capabilities import Capabilities, scalars_of
from rulec.backend.protocol import Backend, Call, Kernel
from rulec.compiler.ir import Program, Site
from rulec.compiler.layout import Layout, is_shaped, scheduled
from rulec.compiler.memory import Ring, narrowed, ringed, turned
from rulec.compiler.pipeline import compile
from rulec.compiler.view import MatrixView
from rulec.environment import LEVEL
from rulec.language.expr.node import IN_GROUP, IN_MODEL, Node
from rulec.language.rule import Rule
from rulec.language.rule_data import orders_tensors
from rulec.language.statistics import Watched
from rulec.runtime.arrays import Vector
from rulec.runtime.buckets.flat import Sets
from rulec.runtime.buckets.plan import Plan
from rulec.runtime.buckets.scalar_table import Counts, ScalarRows
from rulec.runtime.buckets.scalar_table_device import DeviceScalarRows
from rulec.runtime.distributed.process_group import RankGroup
from rulec.runtime.distributed.shards import GlobalTensor, ShardLayout
from rulec.runtime.storage.quantized import Decoded, kernel_of

#: Most bound calls that a bucket keeps for turns of its rings.
MAX_TURNS = 256


@dataclass
class Tensor:
    """A parameter of the engine. It has no bucket and no state until its first gradient.

    `number` makes its random numbers different from other tensors'; `rule` is the rule after routing. Of a shard of a
    tensor, `whole` is its global tensor. `shapes` has the global shapes of states with a shape of their own, of the
    tensor, by name. `in_group` is its number in its group, and the count of the group; `layer`
    is the number of its layer, and the count of layers.
    """

    array: Any
    group: int
    name: str
    rule: Rule
    view: MatrixView
    number: int
    maximize: bool = False
    whole: GlobalTensor | None = None
    bucket: Bucket | None = None
    position: int = 0
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    in_group: tuple[int, int] = (0, 1)
    layer: tuple[float, float] = (math.nan, math.nan)

    @property
    def facts(self) -> dict[str, float]:
        """The facts of the tensor's shape, its number in its group and its layer, and their counts."""
        numbers = zip((*IN_GROUP, *IN_MODEL), (*self.in_group, *self.layer), strict=True)
        return {**self.view.facts, **dict(numbers)}

    @property
    def numel(self) -> int:
        """The number of elements of the global tensor."""
        return int(self.view.facts["numel"])

    @cached_property
    def cuts(self) -> tuple[tuple[str, RankGroup], ...]:
        """The axis of each cut, b, i or j, with the rank group along it."""
        return () if self.whole is None else tuple((self.view.axis(d), rank_group) for d, rank_group in self.whole.cuts)

    @cached_property
    def lines(self) -> tuple[Runs, Runs] | None:
        """The local rows and columns of the global tensor's matrices; None where all are local."""
        if self.whole is None or not self.cuts:
            return None
        shape, indices = self.whole.shape, self.whole.indices
        rows, cols = (
            runs_of([shape[axis] for axis in axes], [indices[axis] for axis in axes])
            for axes in (self.view.whole or self.view).axes
        )
        return rows, cols

    @cached_property
    def places(self) -> Mapping[str, Runs] | None:
        """The local numbers of the global tensor's matrices, of their rows and columns, by b, i and j; None for all."""
        if self.whole is None or self.lines is None:
            return None
        shape, indices = self.whole.shape, self.whole.indices
        sides = (self.view.whole or self.view).axes
        batch = [d for d in range(len(shape)) if d not in (*sides[0], *sides[1])]
        matrices = runs_of([shape[d] for d in batch], [indices[d] for d in batch])
        return dict(zip("bij", (matrices, *self.lines), strict=True))

    @property
    def halved(self) -> bool:
        """Whether the matrices that the rule needs whole are sharded; for some rules all of a tensor are one."""
        whole = "bij" if orders_tensors(self.rule) else "ij"
        return any(letter in whole for letter, _ in self.cuts)

    @cached_property
    def shard_layout(self) -> ShardLayout | None:
        """The shard layout of a tensor with sharded matrices; None for any other tensor."""
        spread = None if self.whole is None or not self.halved else self.whole.spread
        if self.whole is None or spread is None:
            return None
        return ShardLayout(self.view, self.whole.shape, spread, self.shapes)

    def beyond(self, letters: frozenset[str]) -> tuple[RankGroup, ...]:
        """The rank groups to complete a reduction without these axes."""
        return tuple(rank_group for letter, rank_group in self.cuts if letter in letters)


@dataclass
class Version:
    """A program of a bucket for one outcome of its predicates, its kernel, and the kernel bound to the tensors.

    A launch of it `waits` where it needs values of other launches or of other ranks, and `exchanges` where it needs
    owner ranks. After one that `turns`, entries of histories change their arrays.
    """

    program: Program
    layout: Layout
    kernel: Kernel
    plan: Plan
    waits: bool
    exchanges: bool
    turns: bool = False
    rows: ScalarRows | DeviceScalarRows | None = None
    call: Call | None = None

    @property
    def narrow(self) -> frozenset[Node]:
        """The values that kernels read in 16 bits."""
        return frozenset(self.program.result(name).value for name, _ in self.layout.results)


@dataclass
class Bucket:
    """Tensors that one kernel updates in one call: of one program, device and layout, and of any groups.

    `library` computes the values between its stages; `decoded` gives memory for dequantized states. If `parted`,
    tensors are shards: ranks may refuse a step, or fail in it, so no state is written before the last stage. If
    `halved`, matrices are sharded. If `resident`, step counts and scalars are on the device, and a branch on them
    has both arms in the kernel. If `across`, groups and the model have tensors in other ranks. Random bits follow
    from `seed`. If it `begins`, stages before the first reduction over several tensors write no state where they can do
    without: they may run before their step.
    """

    program: Program
    layout: Layout
    device: str
    backend: Backend
    capabilities: Capabilities
    static: Mapping[str, float]
    library: Library
    decoded: Decoded
    parted: bool = False
    halved: bool = False
    resident: bool = False
    seed: int = 0
    across: bool = False
    begins: bool = False
    tensors: list[Tensor] = field(default_factory=list)
    params: list[Any] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    counts: Counts = field(default_factory=lambda: Counts(Vector(np.zeros(0), [])))
    scalar_states: dict[str, Vector] = field(default_factory=dict)
    facts: list[dict[str, float]] = field(default_factory=list)
    versions: dict[tuple[bool, ...], Version] = field(default_factory=dict)
    sites: dict[tuple[bool, ...], list[Site]] = field(default_factory=dict)
    #: The histories, whether their entries change arrays in place of copies, and how far those of each tensor have.
    rings: tuple[Ring, ...] = ()
    turning: bool = False
    turns: np.ndarray[Any, np.dtype[np.int64]] = field(default_factory=lambda: np.zeros(0, np.int64))
    ringed: Version | None = None
    #: The bucket of the tensors themselves, where this is the same one under another program.
    origin: Bucket | None = None
    #: The same bucket under its program with the statistics that were asked for last.
    measuring: Bucket | None = None
    #: The same bucket with states in other memory, where kernels read and write them: see `Engine.place`.
    moved: Bucket | None = None
    at_turn: dict[int, Version] = field(default_factory=dict)
    #: The groups of the tensors, in order.
    groups: np.ndarray[Any, np.dtype[np.int64]] = field(default_factory=lambda: np.zeros(0, np.int64))
    #: The common data of steps of the same tensors, on a device.
    sets: Sets = field(default_factory=Sets)

    def compiled(self, decided: tuple[bool, ...] = ()) -> Version:
        """The version for this outcome of the program's predicates, in their order; compiled at the first call."""
        version = self.versions.get(decided)
        if version is None:
            version = self.versions[decided] = self._compiled(self._program(decided))
        return version

    def specializes(self, decided: tuple[bool, ...], alike: bool) -> bool:
        """Whether tensors with this outcome can take the program with their arms alone; else that with all arms.

        All arms are needed where a branch assigns a state that several tensors share, and where outcomes in a step are
        not `alike` and the reductions over several tensors are other ones on other arms.
        """
        if self.program.shares_in_branches:
            return False
        return alike or self._sites(decided) == self._sites(())

    def _sites(self, decided: tuple[bool, ...]) -> list[Site]:
        """The sites of the reductions over several tensors, in the order of a step."""
        if decided not in self.sites:
            program = self._program(decided)
            self.sites[decided] = [program.sites[n] for n in program.joins]
        return self.sites[decided]

    def _program(self, decided: tuple[bool, ...]) -> Program:
        """The program for this outcome of the predicates."""
        program = self.program
        if not decided:
            return program
        assumed = {place: truth for (place, _), truth in zip(program.predicates, decided, strict=True)}
        return compile(program.rule, self.facts[0], self.static, assumed, memory=program.memory, watch=program.watch)

    def _compiled(self, program: Program) -> Version:
        program, layout, plan = self._scheduled(program)
        if self.capabilities.narrow and not self.parted:
            layout = narrowed(program, layout)
        source, kernel = kernel_of(self.backend, program, layout, self.decoded, partial(self.library.join, axis=0))
        if LEVEL >= 4:
            print(source, file=sys.stderr)
        exchanges = plan.owner_plan is not None and bool(plan.owner_plan.whole)
        waits = exchanges or not plan.alone or (self.parted and plan.reduces)
        return Version(program, layout, kernel, plan, waits, exchanges)

    def _scheduled(self, program: Program) -> tuple[Program, Layout, Plan]:
        """A program after the passes that depend on the layout, its layout, and its plan."""
        chosen = self._scheduled_by(program, early=not self.parted)
        if self.begins and chosen[2].joins and chosen[2].stored_before_joins:
            other = self._scheduled_by(program, early=False)
            return chosen if other[2].stored_before_joins else other
        return chosen

    def _scheduled_by(self, program: Program, early: bool) -> tuple[Program, Layout, Plan]:
        """The same, where states may be stored `early`, before the last stage."""
        program, layout = scheduled(program, self.layout.of(program), early)
        return (
            program,
            layout,
            Plan(program, self.halved, defers=not (self.resident or (self.across and bool(program.joins)))),
        )

    def version(self, decided: tuple[bool, ...] = ()) -> Version:
        """The compiled version for this outcome, bound to the tensors."""
        version = self.versions.get(decided) or self.compiled(decided)
        if version.call is None:
            self._bind(version, self.states)
        return version

    def turned(self, turns: int) -> Version:
        """The compiled version for tensors whose rings have turned so far, bound to their arrays."""
        version = self.at_turn.get(turns)
        if version is None:
            if len(self.at_turn) >= MAX_TURNS:
                self.at_turn.clear()
            if self.ringed is None:
                self.ringed = self._compiled(ringed(self.program)[0])
            version = self.at_turn[turns] = replace(self.ringed, turns=True)
            ahead = [turns - int(now) for now in self.turns]
            states = [turned(s, self.rings, self.layout, n) for s, n in zip(self.states, ahead, strict=True)]
            self._bind(version, states)
        return version

    def turn(self, fired: Any) -> None:
        """Turns the rings of the tensors at the positions `fired`, None for all, after an update of theirs."""
        for position in range(len(self.states)) if fired is None else fired:
            self.states[position].update(turned(self.states[position], self.rings, self.layout, 1))
        chosen = slice(None) if fired is None else fired
        self.turns[chosen] = (self.turns[chosen] + 1) % math.lcm(*map(len, self.rings))
        self._drop_calls()
        if self.measuring is not None:
            self.measuring._drop_calls()

    def stop_turning(self) -> None:
        """From now on a step copies the entries of histories: another kernel will know their arrays."""
        self.turning = False

    def _bind(self, version: Version, all_states: list[dict[str, Any]]) -> None:
        views = [[t.view for t in self.tensors]] if is_shaped(version.program) else []
        version.call = version.kernel.bind(self.params, all_states, *views)
        words = [words_of(self.seed, t.number, None if t.whole is None else t.whole.piece) for t in self.tensors]
        facts = [{**of_shape, **of_bits} for of_shape, of_bits in zip(self.facts, words, strict=True)]
        if self.resident:
            version.rows = DeviceScalarRows(version.program, self.groups, facts, self.library, scalars_of(version.call))
        else:
            version.rows = ScalarRows(version.program, self.groups, facts)

    def is_on_device_only(self, state: str) -> bool:
        """Whether a scalar state is kept on the device, because it follows from reductions of kernels there."""
        return self.resident or (self.capabilities.on_device and state in self.program.finished)

    def under(self, program: Program) -> Bucket:
        """The same tensors and states under another program; its `t` in the next step is the step count so far."""
        counts = self.counts.over(Vector(self.counts.numbers - 1, []))
        return replace(
            self, program=program, layout=self.layout.of(program), counts=counts, versions={}, sites={}, turning=False
        )

    def within(self, program: Program, counts: bool) -> Bucket:
        """The same tensors and states under a program for one part of a step; the part advances `t` where `counts`."""
        held = self.counts if counts else self.counts.held()
        return replace(
            self, program=program, layout=self.layout.of(program), counts=held, versions={}, sites={}, turning=False,
            measuring=None, origin=self,
        )  # fmt: skip

    def measured(self, watch: Watched) -> Bucket:
        """The same tensors and states under a program with these statistics."""
        known = self.measuring
        if known is None or known.program.watch != watch:
            program = compile(self.program.rule, self.facts[0], self.static, memory=self.program.memory, watch=watch)
            known = self.measuring = self.within(program, counts=True)
        return known

    def of_rows(self, position: int, param: Any, states: Mapping[str, Any]) -> Bucket:
        """The same tensors, where for one of them some rows of it and its states stand, copies of their own."""
        self.compiled(next(iter(self.versions), ()))
        params, all_states = [*self.params], [*self.states]
        params[position], all_states[position] = param, dict(states)
        versions = {decided: replace(v, rows=None, call=None) for decided, v in self.versions.items()}
        return replace(self, params=params, states=all_states, versions=versions, turning=False, sets=Sets())

    def over(self, states: Sequence[Mapping[str, Any]]) -> Bucket:
        """The same tensors with their states in other memory."""
        versions = {decided: replace(v, rows=None, call=None) for decided, v in self.versions.items()}
        return replace(
            self, states=[*map(dict, states)], versions=versions, turning=False, measuring=None, moved=None, at_turn={},
            sets=Sets(),
        )  # fmt: skip

    def rebind(self) -> None:
        """Drops the bound calls: tensors moved, or joined."""
        self.at_turn.clear()
        self.sets.clear()
        self.measuring = self.moved = None
        self._drop_calls()

    def _drop_calls(self) -> None:
        for version in self.versions.values():
            version.call = None
