"""From the lines of a rule to values: names become nodes, branches are decided or merged, states become stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from rulec.compiler.across_shapes import WIDE_LEVELS, AcrossShapes, is_wide
from rulec.compiler.axes import AxisInference
from rulec.compiler.dimensions import of_shape
from rulec.compiler.foreseen import FORESEEN, decide, foreseen, is_made_of
from rulec.compiler.indices import fuse
from rulec.compiler.ir import (
    LEVEL_AXES,
    PLAIN,
    Axes,
    Buffer,
    Memory,
    Program,
    Site,
    Stage,
    Store,
    Written,
    axes_of_letters,
)
from rulec.compiler.simplify import as_number, as_truth, fold_node, of_operations, with_operands_of_kind
from rulec.compiler.view import grouping, placed_as
from rulec.compiler.weights import in_memory, part_axes, stored, unbiased, weight, with_memory
from rulec.compiler.widen import widened
from rulec.language.evaluations import standalone
from rulec.language.expr.counts import Count, count_of
from rulec.language.expr.node import (
    FACTS,
    WAVES,
    Kind,
    Node,
    Op,
    is_boolean,
    name,
    names_in,
    node,
    rewrite,
    walk,
)
from rulec.language.expr.static import lowered
from rulec.language.expr.text import expression_text
from rulec.language.inputs import LIKE_P, InputKind, matrices_of
from rulec.language.rule_data import (
    Assign,
    Branch,
    RuleData,
    Statement,
    Statistic,
    assignments,
    conditions,
    differs_by_shape,
)
from rulec.language.source import Span, rule_error
from rulec.language.statistics import PREFIX, STORED, UPDATE, Watched, is_joint

_ELEMENT = axes_of_letters("knbij")


@dataclass
class _Lowering:
    """The walk over the lines: the value of every name so far, and the author's names of values."""

    rule: RuleData
    known: Mapping[str, float]
    values: dict[str, Node]
    axes: AxisInference
    assumed: Mapping[int, bool] = field(default_factory=dict)
    meant: Mapping[int, Mapping[str, Axes]] = field(default_factory=dict)
    watch: Watched = ()
    over: dict[int, dict[str, Axes]] = field(default_factory=dict)
    predicates: dict[int, Node] = field(default_factory=dict)
    sites: dict[Node, Site] = field(default_factory=dict)
    _lines: Counter[Site] = field(default_factory=Counter)
    _arms: list[str] = field(default_factory=list)
    _within: Node | None = None
    _across: AcrossShapes = field(default_factory=AcrossShapes)
    labels: dict[Node, str] = field(default_factory=dict)
    written: dict[Node, Written] = field(default_factory=dict)
    places: dict[str, Span] = field(default_factory=dict)
    counts: dict[Node, Count] = field(default_factory=dict)
    span: Span | None = None

    def __post_init__(self) -> None:
        self._places = {id(branch): place for place, branch in enumerate(conditions(self.rule.step))}
        measured = [each.value for _, each in self.watch]
        self._joins = any(map(is_wide, walk([*self.rule.expressions, *measured])))
        self._differs = self._joins and differs_by_shape(self.rule)

    def expression(self, value: Node) -> Node:
        """An expression of the rule's text, with the values of its names at the current line."""

        def change(n: Node) -> Node:
            if n.op is Op.NAME:
                return self._name(str(n.arg))
            if n.op is Op.WIDEN:
                return widened(as_number(n.args[0]), cast(Axes, n.arg), self.axes)
            value = with_operands_of_kind(lowered(of_shape(self.rule, n, self.known, self.span)))
            return fuse(value, self.rule) or fold_node(self._limited(_of_operations(value)))

        if any(n.op is Op.NAME and str(n.arg) not in self.values for n in walk([value])):
            value = rewrite([value], self._chosen)[0]  # the names of states that are of other shapes alone
        if self._differs:
            value = rewrite([value], self._across.marked)[0]
        done: dict[Node, Node] = {}
        result = rewrite([value], change, done)[0]
        for text, part in done.items():
            if part.args:
                self.written.setdefault(part, (self.span, text))
        return result

    def _chosen(self, value: Node) -> Node:
        """The operand that a `where` gives for all tensors of this shape."""
        truth = decide(value.args[0], self.known) if value.op is Op.WHERE else None
        return value if truth is None else value.args[1 if truth else 2]

    def _limited(self, value: Node) -> Node:
        """A reduction over several tensors, limited to those on the arms around the line."""
        if not is_wide(value) or self._within is None:
            return value
        return node(value.op, value.args[0], self._within, *value.args[1:], value.arg)

    def _name(self, identifier: str) -> Node:
        if identifier not in self.values:
            message = f"{identifier!r} of {self.rule.name} has no value here: its state does not exist for this shape"
            if identifier.rpartition(".")[0] in {move.gradient.rpartition(".")[0] for move in self.rule.moves}:
                message = (
                    f"the gradient at an earlier point of {self.rule.name} is gone at the end of a step that does not "
                    f"read it: measure that of the last point, or read this one in the step"
                )
            raise rule_error(message, self.span)
        return self.values[identifier]

    def statements(self, step: tuple[Statement, ...]) -> None:
        for line in step:
            if isinstance(line, Assign):
                self._assign(line)
            else:
                before = self._across.assigned.copy()
                self._branch(line)
                self._across.leave(line, before)

    def _assign(self, line: Assign) -> None:
        self.span = line.span
        value = self.expression(line.value)
        self.note_sites(value, line.target)
        if line.target in self.rule.state:
            value = self._stored(line.target, value)
        if line.target in self.rule.state or line.target == "p":
            value = self._widened(value, self.axes.buffers[line.target])
        self.values[line.target] = value
        self._across.assign(line, nested=bool(self._arms))
        if line.span is not None:
            self.places[line.target] = line.span
        if value.op.kind is not Kind.LEAF:
            new = line.target in self.rule.state or line.target == "p"
            self.labels.setdefault(value, f"{line.target}_new" if new else line.target)

    def note_sites(self, value: Node, target: str) -> None:
        """Records the counts in a line's value, and the sites of its reductions over several tensors.

        A site is the arms around the line and its target without the prefix of a composed rule: so different rules
        match in a part they share.
        """
        parts = list(walk([value]))
        for n in parts:
            if n not in self.counts and (count := count_of(n)) is not None:
                self.counts[n] = count.written(*self.written.get(n, (self.span, n)))
        new = [n for n in parts if is_wide(n) and n not in self.sites]
        if new:
            line: Site = (*self._arms, target.rpartition(".")[2])
            self._lines[line] += 1
            self.sites |= {n: (*line, self._lines[line], count) for count, n in enumerate(new)}

    def _stored(self, target: str, value: Node) -> Node:
        """The value as a number; for a state of a group or model, with counts and hyper-parameters of that level."""
        value = as_number(value)
        state = self.rule.state.get(target)
        return _at_level(value, state.per) if state is not None and state.per in WIDE_LEVELS else value

    def _branch(self, line: Branch) -> None:
        self.span = line.span
        if any(n.op is Op.DIM for n in walk([line.condition])):
            # A dimension that the tensor lacks has no extent, and the rest of the condition may decide without it.
            decided = decide(line.condition, self.known)
            if decided is not None:
                self._arm(line, decided)
                return
        condition = self.expression(line.condition)
        self.note_sites(condition, "if")
        decided = decide(condition, self.known)
        if decided is not None:
            self._arm(line, decided)
            return
        place = self._places[id(line)]
        # Known before a step, where it is of hyper-parameters, `t` and shape facts alone.
        foreseen = is_made_of(condition, FORESEEN)
        if foreseen:
            condition = self.predicates[place] = as_truth(condition)
        if place in self.assumed:
            self._arm(line, self.assumed[place])
            for key, axes in self.meant.get(place, {}).items():
                if key in self.values:
                    self.values[key] = self._widened(self.values[key], axes)
            return
        if not is_boolean(condition):
            raise rule_error("the condition of an if is true or false: write a comparison", line.span)
        self._merged(line, condition, place if foreseen else None)

    def _merged(self, line: Branch, condition: Node, place: int | None) -> None:
        """Both arms, and the choice between their values; `place` is that of a predicate."""
        before = dict(self.values)
        self._arm(line, True, None if place is None else condition)
        then, self.values = self.values, dict(before)
        self._arm(line, False, None if place is None else node(Op.NOT, condition))
        for key in self.values:
            if key in then and then[key] is not self.values[key]:
                merged = node(Op.WHERE, condition, as_number(then[key]), as_number(self.values[key]))
                self.written.setdefault(merged, (line.span, name(key)))
                self.values[key] = self._stored(key, merged)
                if place is not None and (axes := self.axes.fitting(self.values[key])) is not None:
                    self.over.setdefault(place, {})[key] = axes

    def _arm(self, line: Branch, truth: bool, condition: Node | None = None) -> None:
        """One arm. The `condition` is that of a predicate with both arms in the program: not all tensors are on it."""
        self._arms.append(f"{expression_text(line.condition)}: {truth}")
        around = self._within
        if condition is not None:
            self._within = condition if around is None else node(Op.AND, around, condition)
        self.statements(line.then if truth else line.otherwise)
        self._within = around
        self._arms.pop()

    def _widened(self, value: Node, axes: Axes) -> Node:
        """The value with these axes: it has fewer where the line, or this arm of a branch, needs no more."""
        return widened(as_number(value), axes, self.axes) if self._joins or not axes.number else value


def _of_operations(value: Node) -> Node:
    return of_operations(value, value.op in WAVES and is_made_of(value, FORESEEN))


def _at_level(value: Node, level: str) -> Node:
    """A value stored for a whole group or model: `t` is the count of that level.

    A model's hyper-parameters are the same in every group. Values inside a reduction still belong to each tensor.
    """

    def change(n: Node) -> Node:
        if n.op is Op.STEP:
            return node(Op.STEP, level)
        return node(Op.MODEL_HYPER, n.arg) if n.op is Op.HYPER and level == "model" else n

    reductions = {n: n for n in walk([value]) if n.op.kind is Kind.REDUCE}
    return rewrite([value], change, reductions)[0]


def _leaves(rule: RuleData, states: Mapping[str, Any], memory: Memory) -> dict[str, Node]:
    """The value of each name before the first line."""
    leaves = {fact: node(Op.FACT, fact) for fact in FACTS}
    leaves |= {key: node(Op.HYPER, key) for key in rule.hyper}
    leaves |= {key: node(Op.LOAD, key) for key in (*states, *rule.inputs)}
    return leaves | {"g": node(Op.LOAD, "g"), "grad": node(Op.LOAD, "g"), "p": weight(memory), "t": node(Op.STEP)}


def lower(
    rule: RuleData, facts: Mapping[str, float], static: Mapping[str, float], assumed: Mapping[int, bool] | None = None,
    memory: Memory = PLAIN, meant: Mapping[int, Mapping[str, Axes]] | None = None, watch: Watched = (),
) -> Program:  # fmt: skip
    """The program of a rule for tensors with these shape facts, in a single stage: later passes cut it.

    `static` are the values of static hyper-parameters. `assumed` maps the place of a branch to a truth value: the
    program has only this arm of it, and `meant` is `Program.meant` of the program with both. `memory` says how values
    are stored, and `watch` has the statistics to measure. Raises RuleError at the line of a mistake.
    """
    rule = standalone(rule)
    known = {**facts, **static}
    names = {n: node(Op.HYPER, n) for n in rule.hyper} | {f: node(Op.FACT, f) for f in FACTS}
    states = {}
    for key, state in rule.state.items():
        if state.condition is None or decide(state.condition, known) is not False:
            states[key] = state
    axes = AxisInference.of({"p": _ELEMENT, "g": _ELEMENT, **part_axes(memory)}, static)
    resolve = _Lowering(rule, known, {**names, "p": node(Op.LOAD, "p"), **{k: node(Op.LOAD, k) for k in states}}, axes)
    extents = {k: tuple(resolve.expression(x) for x in s.shape) for k, s in states.items() if s.shape is not None}
    matrices = matrices_of(rule.inputs)
    of_inputs = {k: tuple(map(resolve.expression, matrix.extents)) for k, matrix in matrices.items()}
    axes.buffers |= {key: _input_axes(kind, of_inputs.get(key)) for key, kind in rule.inputs.items()}
    axes.buffers |= {key: _state_axes(rule, key, extents.get(key), known) for key in states}
    lowering = _Lowering(rule, known, _leaves(rule, states, memory), axes, assumed or {}, meant or {}, watch)
    before = dict(lowering.values)
    lowering.statements(rule.step)
    skip = None if rule.skip is None else as_truth(lowering.expression(rule.skip))
    if skip is not None:
        lowering.note_sites(skip, "skip")
    stores = []
    for key in (*states, "p"):
        value, old = as_number(lowering.values[key]), before[key]
        if value is not old:
            stores += stored(memory, value) if key == "p" else [_state_store(rule, memory, key, value)]
    present = tuple((key, each) for key, each in watch if is_joint(each) or not _lacks(lowering, each, static))
    measured = _statistics(lowering, present, before["p"], memory)
    stores += [Store(buffer.name, value) for buffer, value in measured]
    buffers = [Buffer("p", "param", _ELEMENT), Buffer("g", "grad", _ELEMENT)]
    counts = [*lowering.counts.values()]
    for key, state in states.items():
        if key in extents:
            counts.append(Count(f"an extent of state {key}", extents[key], bounded=True, span=state.span))
        buffers.append(Buffer(key, "state", axes.buffers[key], as_number(resolve.expression(state.init))))
    read = {str(n.arg) for n in walk([s.value for s in stores] + ([] if skip is None else [skip])) if n.op is Op.LOAD}
    for key in (key for key in rule.inputs if key in read):
        if key in of_inputs:
            counts.append(Count(f"an extent of input {key}", of_inputs[key], bounded=True, span=matrices[key].span))
        buffers.append(Buffer(key, "input", axes.axes(node(Op.LOAD, key))))
    buffers += [buffer for buffer, _ in measured]
    grouped = grouping(rule, known)
    parts = 0 if grouped is None else grouped.parts
    evaluate = resolve.expression(rule.evaluate) if rule.evaluate is not None else None
    program = Program(
        rule.name, rule, tuple(buffers), rule.hyper, (Stage(tuple(stores)),), labels=lowering.labels,
        skip=skip, evaluate=evaluate, places=lowering.places, predicates=tuple(lowering.predicates.items()),
        sites=lowering.sites, counts=tuple(foreseen(count, rule) for count in counts), parts=parts,
        meant=lowering.over, static=static, written=lowering.written, watch=watch,
    )  # fmt: skip
    return with_memory(program, memory)


def _statistics(lowering: _Lowering, watch: Watched, old: Node, memory: Memory) -> list[tuple[Buffer, Node]]:
    """The statistics to measure, as buffers with their values; RuleError for one that differs between elements."""
    new = lowering.values["p"]
    lowering.values |= {"p": old, UPDATE: node(Op.SUB, new, old), STORED: in_memory(memory, new)}
    done = []
    for key, statistic in watch:
        lowering.span = statistic.span
        value = as_number(lowering.expression(statistic.value))
        lowering.note_sites(value, PREFIX + key)
        axes = lowering.axes.axes(value)
        if {"i", "j"} <= set(axes.letters):
            raise rule_error(
                f"the statistic {key} differs from element to element: reduce it, as in mean({key}) or rms({key})",
                statistic.span,
            )
        done.append((Buffer(PREFIX + key, "statistic", axes), value))
    return done


def _lacks(lowering: _Lowering, statistic: Statistic, static: Mapping[str, float]) -> bool:
    """Whether other tensors alone have a state, or a line of an arm, that a statistic reads."""
    rule = lowering.rule

    def by_shape(condition: Node | None) -> bool:
        if condition is None or decide(condition, static) is not None:
            return False
        return decide(condition, lowering.known) is not None

    def elsewhere(key: str) -> bool:
        if key in rule.state:
            return by_shape(rule.state[key].condition)
        branches = (branch for branch in conditions(rule.step) if by_shape(branch.condition))
        return any(line.target == key for branch in branches for line in assignments((branch,)))

    return any(elsewhere(key) for key in names_in([statistic.value]) if key not in lowering.values)


def _state_store(rule: RuleData, memory: Memory, key: str, value: Node) -> Store:
    return unbiased(memory, key, value, [*rule.state].index(key)) if key in memory.unbiased else Store(key, value)


def _state_axes(
    rule: RuleData, key: str, extents: tuple[Node, ...] | None, known: Mapping[str, float]
) -> Axes:  # fmt: skip
    state = rule.state[key]
    if state.number is not None:
        return axes_of_letters(LEVEL_AXES[placed_as(rule, state.per, state.number, known, state.span)])
    if extents is None:
        return axes_of_letters(LEVEL_AXES[state.per])
    if len(extents) != 2:
        message = f"state {key} has a shape of {len(extents)} extents: give two, rows and columns"
        raise rule_error(message, rule.state[key].span)
    return Axes("knbij", *extents)


def _input_axes(kind: InputKind, extents: tuple[Node, ...] | None) -> Axes:
    if extents is not None:
        return Axes("knbij", *extents)
    return axes_of_letters("knbij" if kind == LIKE_P else "")
