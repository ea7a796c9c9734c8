"""The plan of a functional step: rules are routed and compiled for the leaves of a tree, and leaves put in buckets.

Transformations in the manner of optax return updates to be added later. For them a program computes the change of its
parameter instead of the new parameter. The change in `p - change` is returned without rounding: `(p - change) - p`
would keep only the digits of `p`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from rulec.backend import registry
from rulec.compiler.axes import AxisInference
from rulec.compiler.foreseen import check_counts
from rulec.compiler.ir import PLAIN, Axes, Buffer, Memory, Program, Stage, Store
from rulec.compiler.layout import PLAIN_STORAGE, Layout, layout_for, scheduled
from rulec.compiler.pipeline import compile
from rulec.compiler.routing import Router
from rulec.compiler.scalars import ScalarTable, evaluate_once
from rulec.compiler.view import MatrixView, view_of
from rulec.errors import BackendUnsupported, RuleError, TensorError
from rulec.formats import UNBIASED, Format, of_key
from rulec.functional.values import Leaf, Values
from rulec.language.expr.node import IN_GROUP, IN_MODEL, Kind, Node, Op, node, rewrite, walk
from rulec.language.rule import Rule
from rulec.language.rule_data import sees_shape
from rulec.language.statistics import PREFIX, Watched
from rulec.runtime.buckets.plan import Plan
from rulec.runtime.engine import EPS
from rulec.runtime.layers import layer_for, layers_of
from rulec.runtime.statistics import Words, of_rule
from rulec.runtime.storage.allocator import StateSpec, state_specs
from rulec.runtime.storage.options import Storage, check_single


@dataclass(frozen=True, eq=False)
class Route:
    """The rule of a leaf before it is routed, and the leaf's group, tags and static hyper-parameters.

    Values of the model span the leaves of one `owner`, which is `rule` where it is None.
    """

    rule: Rule
    group: int = 0
    tags: Collection[str] = ()
    static: Mapping[str, float] = field(default_factory=dict)
    owner: Rule | None = None


@dataclass(frozen=True)
class Options:
    """The options of compilation.

    `state_dtype` has the storage dtypes or formats of states by name, or of all by "". `weights` is the kind of leaves
    of 16 bits in memory, of `rulec.compiler.weights`. With `update` a step computes the change of each parameter, not
    the new parameter: in float32 for a parameter of a kind, else in its dtype. `functions` is the backend of a step's
    functions. `backend` runs the passes over elements: "jax" alone, "cpu" where it can, or "either", the faster.
    `watch` are the statistics that a step measures.
    """

    update: bool = False
    maximize: bool = False
    seed: int = 0
    state_dtype: tuple[tuple[str, str], ...] = ()
    weights: str = ""
    backend: str = "jax"
    functions: str = "jax"
    watch: Words = ()


@dataclass(eq=False)
class Bucket:
    """Leaves of one rule with one program and one layout; `places` are their numbers in the tree.

    `owner` is their rule before it is routed: values of the model span all leaves of this rule, and no others.
    `functions` is the backend of the kernel. `formats` has the formats of states in codes: the layout has them decoded.
    `plain` is the program of a step that measures no statistics.
    """

    owner: Rule
    functions: str
    program: Program
    plain: Program
    layout: Layout
    static: Mapping[str, float]
    formats: Mapping[str, Format] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)
    views: list[MatrixView] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    facts: list[dict[str, float]] = field(default_factory=list)

    @cached_property
    def kernel(self) -> Any:
        """The kernel of the passes over elements, built at the first step: a first state needs none."""
        backend = registry.usable(self.functions)
        return backend.build(self.program, self.layout, backend.emit(self.program, self.layout))

    @cached_property
    def plan(self) -> Plan:
        """The plan of the work between the stages."""
        return Plan(self.program)

    @cached_property
    def guards(self) -> Mapping[Node, Guard]:
        """Matrix function -> the condition under which alone it is wanted."""
        return guards_of(self.program)

    @cached_property
    def table(self) -> ScalarTable:
        """The scalar program."""
        return ScalarTable(self.program.scalars)

    @cached_property
    def own_rows(self) -> bool:
        """Whether tensors of one group may have different scalars, even with equal counts."""
        states = {b.name for b in self.program.states if "n" in b.axes.letters}
        return bool(self.table.facts) or bool(states & self.table.loads)

    @cached_property
    def specs(self) -> list[StateSpec]:
        """The states that are arrays for each leaf."""
        return state_specs(self.program, self.layout)

    def state_shapes(self) -> Iterator[tuple[StateSpec, int, MatrixView, tuple[int, ...]]]:
        """Each state that is an array, for each leaf: the leaf's place and view, and the state's shape, decoded."""
        for spec in self.specs:
            for place, view, facts in zip(self.places, self.views, self.facts, strict=True):
                yield spec, place, view, tuple(spec.shape(view, self.static, facts))

    def kept_shape(self, i: int, axes: Axes) -> tuple[int, ...]:
        """The shape of rows, columns or matrices of leaf i as they are kept, in a state or a statistic."""
        extents = axes.rows, axes.cols
        rows, cols = (1 if n is None else int(evaluate_once(n, self.static, self.facts[i], {})) for n in extents)
        return self.views[i].kept_shape(rows, cols, axes.letters)

    @cached_property
    def group_at(self) -> np.ndarray[Any, Any]:
        """The groups of the leaves."""
        return np.array(self.groups, np.int64)


class StepPlan:
    """Everything about a step that follows from shapes and dtypes alone.

    `arrays` are the names of the states that are an array for each leaf, in order. `numbers` is state -> level
    (`tensor`, `group` or `model`), for the states of numbers. `having` is state -> places of the leaves with it.
    """

    def __init__(self, leaves: Sequence[Leaf], routes: Sequence[Route | None], options: Options, groups: int) -> None:
        self.leaves, self.routes, self.options, self.groups = leaves, routes, options, groups
        self._storage = Storage(dict(options.state_dtype), options.weights)
        # One router for each rule: it makes the rules to which it routes, and leaves of a bucket share one rule object.
        rules = {id(one.rule): one.rule for one in routes if one is not None}
        self._routers = {key: Router(rule) for key, rule in rules.items()}
        self._watched_by_rule: dict[int, Watched] = {}
        self.rules: list[Rule] = []
        self.buckets: list[Bucket] = []
        tags = [() if one is None else one.tags for one in routes]
        self._layers = layers_of([leaf.name for leaf in leaves], tags)
        known: dict[Any, Bucket] = {}
        for place, (leaf, route) in enumerate(zip(leaves, routes, strict=True)):
            if route is not None:
                self.rules.append(self._route(leaf, route))
                self._place(known, place, leaf, self.rules[-1], route)
        self.arrays: dict[str, None] = {}
        self.numbers: dict[str, str] = {}
        self.having: dict[str, list[int]] = {}
        self._note_states()

    def _route(self, leaf: Leaf, route: Route) -> Rule:
        router = self._routers[id(route.rule)]
        if leaf.paired and any(map(sees_shape, router.rules)):
            raise TensorError(
                f"{route.rule.name} treats tensors by their dimensions, and the parameter {leaf.name} is complex: "
                f"give its real and its imaginary part as leaves of their own"
            )
        return router.choose(leaf.shape, route.tags, leaf.name)

    def _place(self, known: dict[Any, Bucket], place: int, leaf: Leaf, rule: Rule, route: Route) -> None:
        static = {name: route.static[name] for name, hyper in rule.hyper.items() if hyper.static}
        view = view_of(rule, leaf.shape, static)
        group = [i for i, other in enumerate(self.routes) if other is not None and other.group == route.group]
        layer = layer_for(rule, leaf.name, self._layers[place])
        numbers = dict(zip((*IN_GROUP, *IN_MODEL), (group.index(place), len(group), *layer), strict=True))
        facts = {**view.facts, "machine_eps": EPS[leaf.dtype], **numbers}
        memory = self._memory(rule, leaf)
        plain = check_counts(compile(rule, facts, static, memory=memory), {**facts, **static})
        watch = self._watched(rule)
        program = compile(rule, facts, static, memory=memory, watch=watch) if watch else plain
        states, formats = self._stored(program, leaf)
        layout = layout_for(program, leaf.dtype, leaf.grad_dtype, states, self.options.maximize)
        check_single(program, layout, leaf.name)
        key = id(route.rule), program, layout, tuple(sorted(static.items())), tuple(formats.items())
        if key not in known:
            known[key] = self._bucket(route.owner or route.rule, (program, plain), layout, static, formats)
            self.buckets.append(known[key])
        bucket = known[key]
        bucket.places.append(place)
        bucket.views.append(view)
        bucket.groups.append(route.group)
        bucket.facts.append(facts)

    def _memory(self, rule: Rule, leaf: Leaf) -> Memory:
        """The memory of a leaf's program: existing states keep theirs."""
        if leaf.paired:
            return PLAIN
        memory, existing = self._storage.memory_of(rule, leaf.dtype), dict(leaf.states)
        unbiased = (s for s in rule.state if (existing[s] == UNBIASED if s in existing else s in memory.unbiased))
        return replace(memory, unbiased=frozenset(unbiased))

    def _stored(self, program: Program, leaf: Leaf) -> tuple[dict[str, str], dict[str, Format]]:
        """The dtypes of a leaf's states, decoded, and the formats of those in codes."""
        dtypes, formats = self._storage.of(program, leaf.dtype, 0 if leaf.paired else math.prod(leaf.shape))
        for name, word in leaf.states:
            if name not in {*dtypes, *formats}:
                continue
            formats.pop(name, None)
            if word in PLAIN_STORAGE:
                dtypes[name] = "bfloat16" if word == UNBIASED else word
            else:
                formats[name] = of_key(word)
        return dtypes | dict.fromkeys(formats, "float32"), dict(sorted(formats.items()))

    def _watched(self, rule: Rule) -> Watched:
        """The statistics of a rule's leaves."""
        if id(rule) not in self._watched_by_rule:
            self._watched_by_rule[id(rule)] = of_rule(rule, self.options.watch)
        return self._watched_by_rule[id(rule)]

    def _bucket(
        self, owner: Rule, programs: tuple[Program, Program], layout: Layout, static: Mapping[str, float],
        formats: Mapping[str, Format],
    ) -> Bucket:  # fmt: skip
        """A bucket without leaves; `programs` are its program and the one without statistics."""
        program, layout = scheduled(programs[0], layout)
        if self.options.update and not program.memory.weights:
            program = as_update(program)
        return Bucket(owner, self.options.functions, program, programs[1], layout, static, formats)

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
        """Whether leaves have counts of their own, because a rule may skip the steps of some leaves alone."""
        apart = any(self._skips_some(bucket.program) for bucket in self.buckets)
        if apart and {"group", "model"} & {*self.numbers.values()}:
            what = "a skip of some tensors beside a state of groups or the model"
            raise BackendUnsupported(self.options.functions, what, self._name)
        return apart

    @property
    def _name(self) -> str:
        return self.rules[0].name

    def _skips_some(self, program: Program) -> bool:
        if program.skip is None:
            return False
        return bool(AxisInference(program).axes(program.skip).letters) or len({*self.rules}) > 1

    @cached_property
    def plain(self) -> StepPlan:
        """The plan of the same step without statistics, with the same buckets."""
        return StepPlan(self.leaves, self.routes, replace(self.options, watch=()), self.groups)

    @cached_property
    def statistics(self) -> Mapping[str, str]:
        """The level of each statistic that any leaves have, as in `numbers`, or `array`; of several the finest."""
        levels: dict[str, str] = {}
        for bucket in self.buckets:
            for buffer in bucket.program.statistics:
                name = buffer.name.removeprefix(PREFIX)
                levels[name] = max(levels.get(name, _LEVELS[0]), _level(buffer), key=_LEVELS.index)
        return levels

    def measured(self) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        """Each statistic of each leaf: its name, the place of the leaf, and the shape of its value."""
        for bucket in self.buckets:
            for buffer in bucket.program.statistics:
                for i, place in enumerate(bucket.places):
                    shape = () if buffer.axes.number else bucket.kept_shape(i, buffer.axes)
                    yield buffer.name.removeprefix(PREFIX), place, shape

    @cached_property
    def reads_parameters(self) -> bool:
        """Whether a step needs the parameters: as operands, or to return new ones."""
        return not self.options.update or any(_reads_p(bucket.program) for bucket in self.buckets)

    def coarsest(self, group: int) -> float:
        """The machine epsilon of a group: one value for all its leaves, of their coarsest dtype."""
        pairs = zip(self.leaves, self.routes, strict=True)
        return max((EPS[leaf.dtype] for leaf, one in pairs if one and one.group == group), default=EPS["float32"])

    def states_of(self, bucket: Bucket, level: str) -> list[str]:
        """The states of a bucket at a level, by name."""
        return [b.name for b in bucket.program.states if _level(b) == level]


#: The levels of values, from the coarsest to the finest.
_LEVELS = ("model", "group", "tensor", "array")


def _level(buffer: Buffer) -> str:
    letters = buffer.axes.letters
    if not buffer.axes.number:
        return "array"
    return "tensor" if "n" in letters else "group" if "k" in letters else "model"


def _reads_p(program: Program) -> bool:
    roots = [root for stage in program.stages for root in stage.roots]
    roots += program.between
    return any(n.op is Op.LOAD and n.arg == "p" for n in walk(roots + ([program.skip] if program.skip else [])))


def values_of(plan: StepPlan, whole: StepPlan, values: Values) -> Values:
    """The part of `values` for `plan`, a plan of some of the leaves of `whole`."""
    numbers = dict(values.numbers)
    for name, level in plan.numbers.items():
        if level == "tensor":
            numbers[name] = numbers[name][np.searchsorted(whole.having[name], plan.having[name])]
    return Values(values.count, values.arrays, numbers)


@dataclass(frozen=True)
class Guard:
    """A value is wanted only where `condition` is `truth`."""

    condition: Node
    truth: bool


def guards_of(program: Program) -> Mapping[Node, Guard]:
    """The matrix functions that are wanted under one condition alone."""
    roots = program.between
    roots += [root for stage in program.stages for root in stage.roots]
    roots += [program.skip] if program.skip is not None else []
    guards: dict[Node, Guard | None] = dict.fromkeys(roots)
    # Whoever uses a value comes after it in a walk: from the last to the first, all uses are known.
    for user in reversed([*walk(roots)]):
        for place, operand in enumerate(user.args):
            _note(guards, operand, _guard_of_use(user, place, guards[user]))
    costly = (v for v in guards if v.op.kind is Kind.MATRIX and v.op is not Op.TRANSPOSE)
    return {v: guard for v in costly if (guard := guards[v]) is not None}


def _note(guards: dict[Node, Guard | None], value: Node, guard: Guard | None) -> None:
    guards[value] = guard if value not in guards or guards[value] == guard else None


def _guard_of_use(user: Node, place: int, guard: Guard | None) -> Guard | None:
    """The guard of the operand at this place of a value that is itself wanted under `guard`."""
    return Guard(user.args[0], place == 1) if user.op is Op.WHERE and place > 0 else guard


_P = node(Op.LOAD, "p")


def as_update(program: Program) -> Program:
    """The same program with the change of the parameter stored in `p`."""
    stages = [replace(stage, stores=tuple(map(_changed, stage.stores))) for stage in program.stages]
    values = {s.value: "update" for stage in stages for s in stage.stores if s.buffer == "p"}
    if program.watch:
        stages[-1] = _measuring(program, stages[-1])
    return replace(program, stages=tuple(stages), labels={**program.labels, **values})


def _measuring(program: Program, stage: Stage) -> Stage:
    """The last stage with statistics of the change itself, where the difference `new - p` would be rounded."""
    new = {s.value for s in program.stages[-1].stores if s.buffer == "p"}
    measured = {buffer.name for buffer in program.statistics}
    others = {str(n.arg) for n in walk([s.value for s in program.finish if s.buffer not in measured])}

    def change(value: Node) -> Node:
        is_change = value.op is Op.SUB and value.args[0] in new and value.args[1] is _P
        return _change(value.args[0]) if is_change else value

    reduces = (r if r.name in others else replace(r, value=rewrite([r.value], change)[0]) for r in stage.reduces)
    return replace(stage, reduces=tuple(reduces))


def _changed(store: Store) -> Store:
    return replace(store, value=_change(store.value)) if store.buffer == "p" else store


def _change(value: Node) -> Node:
    """`value - p`, without `p` where it is a sum that begins with `p`."""
    change = _beside(value)
    return node(Op.SUB, value, _P) if change is None else change


def _beside(value: Node) -> Node | None:
    """The value `x` in a sum `p + x`, also with further terms; None for a value of another form."""
    beside: dict[Node, Node] = {}
    for part in walk([value]):
        if part.op not in (Op.ADD, Op.SUB):
            continue
        for first, second in (part.args, part.args[::-1])[: 2 if part.op is Op.ADD else 1]:
            if first is _P:
                beside[part] = second if part.op is Op.ADD else node(Op.NEG, second)
            elif first in beside:
                beside[part] = node(part.op, beside[first], second)
            if part in beside:
                break
    return beside.get(value)
