"""A rule made ready for the leaves of a tree: routed, compiled, and put in buckets, once for each set of shapes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rulec.backend import registry
from rulec.compiler.axes import AxisInference
from rulec.compiler.ir import Buffer, Program
from rulec.compiler.layout import Layout, layout_for, scheduled
from rulec.compiler.lower import check_counts
from rulec.compiler.pipeline import compile
from rulec.compiler.routing import Router
from rulec.compiler.scalars import ScalarTable
from rulec.compiler.update import as_update
from rulec.compiler.view import MatrixView, matrix_view
from rulec.errors import BackendUnsupported, RuleError, TensorError
from rulec.language.node import Node, Op, walk
from rulec.language.rule import Rule
from rulec.language.traits import sees_shape
from rulec.pure.guards import Guard, guards_of
from rulec.pure.leaf import Leaf
from rulec.runtime.engine import EPS
from rulec.runtime.plan import Plan
from rulec.runtime.state import StateSpec, state_specs


@dataclass(frozen=True, eq=False)
class Assignment:
    """What updates a leaf: the rule, before it is routed, its group and static hyper-parameters, and its tags."""

    rule: Rule
    group: int = 0
    tags: Collection[str] = ()
    static: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """How a rule is compiled.

    `state_dtype` gives the storage dtype of states by name, or by "" of all; with `update` what is computed is the
    change of each parameter, not the new parameter. `functions` is the backend whose functions a
    step is made of. `backend` is what runs one pass over elements: "jax" alone, "cpu" where it can, or "either", the
    faster.
    """

    update: bool = False
    maximize: bool = False
    seed: int = 0
    state_dtype: tuple[tuple[str, str], ...] = ()
    backend: str = "jax"
    functions: str = "jax"


@dataclass(eq=False)
class Bucket:
    """Leaves of one rule that one program updates, in one layout; `places` are theirs in the tree.

    `owner` is their rule before it is routed: what is of the model is of all its leaves, and of no others.
    `functions` is the backend of the kernel.
    """

    owner: Rule
    functions: str
    program: Program
    layout: Layout
    static: Mapping[str, float]
    places: list[int] = field(default_factory=list)
    views: list[MatrixView] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    facts: list[dict[str, float]] = field(default_factory=list)

    @cached_property
    def kernel(self) -> Any:
        """The kernel of one pass over elements, made when a step first asks: a first state needs none."""
        backend = registry.usable(self.functions)
        return backend.build(self.program, self.layout, backend.emit(self.program, self.layout))

    @cached_property
    def plan(self) -> Plan:
        """What is worked out between the stages."""
        return Plan(self.program)

    @cached_property
    def guards(self) -> Mapping[Node, Guard]:
        """The matrix functions that are wanted under a condition alone."""
        return guards_of(self.program)

    @cached_property
    def table(self) -> ScalarTable:
        """The scalar program."""
        return ScalarTable(self.program.scalars)

    @cached_property
    def own_rows(self) -> bool:
        """Whether tensors of one group may have different scalars, their counts apart."""
        states = {b.name for b in self.program.states if "n" in b.axes.letters}
        return bool(self.table.facts) or bool(states & self.table.loads)

    @cached_property
    def specs(self) -> list[StateSpec]:
        """The states that are arrays for each leaf."""
        return state_specs(self.program, self.layout)

    def state_shapes(self) -> Iterator[tuple[StateSpec, int, MatrixView, tuple[int, ...]]]:
        """These states of each leaf: the leaf's place and view, and the state's shape."""
        for spec in self.specs:
            for place, view, facts in zip(self.places, self.views, self.facts, strict=True):
                yield spec, place, view, tuple(spec.shape(view, self.static, facts))

    @cached_property
    def group_at(self) -> np.ndarray[Any, Any]:
        """The groups of the leaves."""
        return np.array(self.groups, np.int64)


class StepPlan:
    """Everything about a step that follows from shapes and dtypes alone.

    `arrays` are the names of the states that are arrays for each leaf, in order; `numbers` those that are numbers, with
    their level (`tensor`, `group` or `model`); `having` the leaves that have a state, by its name.
    """

    def __init__(
        self, leaves: Sequence[Leaf], assigned: Sequence[Assignment | None], options: Options, groups: int
    ) -> None:
        self.leaves, self.assigned, self.options, self.groups = leaves, assigned, options, groups
        # One for each rule: what it routes to is made by it, and leaves of one bucket have the very same rule.
        rules = {id(own.rule): own.rule for own in assigned if own is not None}
        self._routers = {key: Router(rule) for key, rule in rules.items()}
        self.rules: list[Rule] = []
        self.buckets: list[Bucket] = []
        known: dict[Any, Bucket] = {}
        for place, (leaf, own) in enumerate(zip(leaves, assigned, strict=True)):
            if own is not None:
                self.rules.append(self._route(leaf, own))
                self._place(known, place, leaf, self.rules[-1], own)
        self.arrays: dict[str, None] = {}
        self.numbers: dict[str, str] = {}
        self.having: dict[str, list[int]] = {}
        self._note_states()

    def _route(self, leaf: Leaf, own: Assignment) -> Rule:
        router = self._routers[id(own.rule)]
        if leaf.paired and any(map(sees_shape, router.rules)):
            raise TensorError(
                f"{own.rule.name} treats tensors by their dimensions, and the parameter {leaf.name} is complex: give "
                f"its real and its imaginary part as leaves of their own"
            )
        return router.choose(leaf.shape, own.tags, leaf.name)

    def _place(self, known: dict[Any, Bucket], place: int, leaf: Leaf, rule: Rule, own: Assignment) -> None:
        view = matrix_view(leaf.shape, rule.view)
        facts = {**view.facts, "machine_eps": EPS[leaf.dtype]}
        static = {name: own.static[name] for name, hyper in rule.hyper.items() if hyper.static}
        program = check_counts(compile(rule, facts, static), {**facts, **static})
        states = self._state_dtypes(program, leaf)
        layout = layout_for(program, leaf.dtype, leaf.grad_dtype, states, self.options.maximize)
        key = id(own.rule), program, layout, tuple(sorted(static.items()))
        if key not in known:
            known[key] = self._bucket(own.rule, program, layout, static)
            self.buckets.append(known[key])
        bucket = known[key]
        bucket.places.append(place)
        bucket.views.append(view)
        bucket.groups.append(own.group)
        bucket.facts.append(facts)

    def _state_dtypes(self, program: Program, leaf: Leaf) -> dict[str, str]:
        given = {"": leaf.dtype, **dict(self.options.state_dtype), **dict(leaf.states)}
        return {b.name: given.get(b.name, given[""]) for b in program.states}

    def _bucket(self, owner: Rule, program: Program, layout: Layout, static: Mapping[str, float]) -> Bucket:
        program, layout = scheduled(program, layout)
        if self.options.update:
            program = as_update(program)
        return Bucket(owner, self.options.functions, program, layout, static)

    def _note_states(self) -> None:
        for bucket in self.buckets:
            for buffer in bucket.program.states:
                level = _level(buffer)
                if level == "array":
                    self.arrays[buffer.name] = None
                elif self.numbers.setdefault(buffer.name, level) != level:
                    raise RuleError(
                        f"{buffer.name} is kept per {self.numbers[buffer.name]} by one rule, and per {level}"
                    )
                self.having.setdefault(buffer.name, []).extend(bucket.places)
        self.having = {name: sorted(places) for name, places in self.having.items()}
        both = self.arrays.keys() & self.numbers.keys()
        if both:
            raise RuleError(f"{min(both)} is an array by one rule and a number by another: give one another name")

    @cached_property
    def own_counts(self) -> bool:
        """Whether leaves may have been updated a different number of times: a rule skips the steps of some alone."""
        found = any(self._skips_some(bucket.program) for bucket in self.buckets)
        if found and {"group", "model"} & {*self.numbers.values()}:
            what = "a skip of some tensors beside a state of groups or the model"
            raise BackendUnsupported(self.options.functions, what, self._name)
        return found

    @property
    def _name(self) -> str:
        return self.rules[0].name

    def _skips_some(self, program: Program) -> bool:
        if program.skip is None:
            return False
        return bool(AxisInference(program).axes(program.skip).letters) or len({*self.rules}) > 1

    @cached_property
    def reads_parameters(self) -> bool:
        """Whether a step needs the parameters: to compute with, or to give new ones."""
        return not self.options.update or any(_reads_p(bucket.program) for bucket in self.buckets)

    def coarsest(self, group: int) -> float:
        """The machine epsilon of a group, which is that of the coarsest dtype: it has one value for all its leaves."""
        pairs = zip(self.leaves, self.assigned, strict=True)
        return max((EPS[leaf.dtype] for leaf, own in pairs if own and own.group == group), default=EPS["float32"])

    def states_of(self, bucket: Bucket, level: str) -> list[str]:
        """The states of a bucket at a level, by name."""
        return [b.name for b in bucket.program.states if _level(b) == level]


def _level(buffer: Buffer) -> str:
    letters = set(buffer.axes.letters)
    if letters & {"b", "i", "j"}:
        return "array"
    return "tensor" if "n" in letters else "group" if "k" in letters else "model"


def _reads_p(program: Program) -> bool:
    roots = [root for stage in program.stages for root in stage.roots]
    roots += program.between
    return any(n.op is Op.LOAD and n.arg == "p" for n in walk(roots + ([program.skip] if program.skip else [])))
