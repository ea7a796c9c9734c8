"""From the lines of a rule to values: names become nodes, branches are decided or merged, states become stores."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from rulec.compiler.across_shapes import WIDE_LEVELS, AcrossShapes, is_wide
from rulec.compiler.axes import AxisInference
from rulec.compiler.indices import fuse, index_of
from rulec.compiler.ir import (
    COLS,
    LEVEL_AXES,
    PLAIN,
    ROWS,
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
from rulec.compiler.simplify import fold_node, of_operations
from rulec.compiler.view import grouping, placed_as
from rulec.compiler.weights import in_memory, part_axes, stored, unbiased, weight, with_memory
from rulec.compiler.widen import widened
from rulec.language.evaluations import standalone
from rulec.language.expr.arithmetic import NUMPY, number_known
from rulec.language.expr.counts import Count, count_of
from rulec.language.expr.node import (
    FACTS,
    NUMBERS,
    PLACED,
    WAVES,
    Kind,
    Node,
    Op,
    const,
    extent,
    is_boolean,
    name,
    names_in,
    node,
    rewrite,
    walk,
)
from rulec.language.expr.static import ALONG, is_lowered, lowered
from rulec.language.expr.text import expression_text
from rulec.language.inputs import LIKE_P, InputKind, matrices_of
from rulec.language.rule_data import (
    FLATTENED,
    Assign,
    Branch,
    RuleData,
    Statement,
    Statistic,
    assignments,
    conditions,
    differs_by_shape,
    placed_level,
)
from rulec.language.source import Span, rule_error
from rulec.language.statistics import PREFIX, STORED, UPDATE, Watched, is_joint

_ELEMENT = axes_of_letters("knbij")

#: The leaves of what is known before a step.
_FORESEEN = (Op.CONST, Op.HYPER, Op.STEP, Op.FACT)


def decide(condition: Node, known: Mapping[str, float]) -> bool | None:
    """The truth of a condition of shape facts and static hyper-parameters; None where it depends on more."""
    number = number_known(condition, known)
    return None if number is None else bool(number)


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
                return widened(_numeric(n.args[0]), cast(Axes, n.arg), self.axes)
            value = _numeric_operands(lowered(self._of_shape(n)))
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

    def _of_shape(self, value: Node) -> Node:
        """What is of axes or blocks, as it is for this tensor; `dim(i)` and `index` of its shape."""
        if value.op is Op.INDEX:
            return index_of(self.rule, value, self.known, self.span)
        if value.op is Op.DIM:
            return self._extent(self._dimension("dim({})", value.args[0]))
        if value.op in ALONG and not is_lowered(value):
            *operands, number = value.args
            return node(value.op, *operands, *self._along(self._dimension("axis={}", number)))
        if value.op.kind is Kind.REDUCE and value.arg in PLACED:
            return node(
                value.op, value.args[0], placed_as(self.rule, str(value.arg), value.args[1], self.known, self.span)
            )
        return value

    def _dimension(self, text: str, number: Node) -> int:
        """The dimension that a number in a call stands for; RuleError, with the call as `text`, where there is none."""
        known, said = number_known(number, self.known), text.format(expression_text(number))
        count = int(self.known["ndim"])
        if known is None:
            raise rule_error(
                f"{said} must be known when a kernel is made: make it of numbers and shape facts", self.span
            )
        if not float(known).is_integer() or not -count <= known < count:
            size = f"{count} dimension{'' if count == 1 else 's'}"
            raise rule_error(f"a tensor of {size} has no {said}: put it under a condition on ndim", self.span)
        return int(known) % count

    def _extent(self, dimension: int) -> Node:
        """The extent of a dimension: where it is all rows or all columns of the matrix, these."""
        count = int(self.known["ndim"])
        if self.rule.view == FLATTENED and not placed_level(self.rule):
            if dimension == 0 and count > 1:
                return ROWS
            if dimension == count - 1 < 2:
                return COLS
        return node(Op.FACT, extent(dimension))

    def _along(self, dimension: int) -> tuple[Node, Node, Node]:
        """The extent of a dimension, and the numbers of elements before it and after it."""
        sizes = [self._extent(k) for k in range(int(self.known["ndim"]))]
        return sizes[dimension], _product(sizes[:dimension]), _product(sizes[dimension + 1 :])

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
        value = _numeric(value)
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
        foreseen = is_made_of(condition, _FORESEEN)
        if foreseen:
            condition = self.predicates[place] = _truth(condition)
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
                merged = node(Op.WHERE, condition, _numeric(then[key]), _numeric(self.values[key]))
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
        return widened(_numeric(value), axes, self.axes) if self._joins or not axes.number else value


def _product(factors: Sequence[Node]) -> Node:
    """The product of some extents."""
    return functools.reduce(lambda a, b: node(Op.MUL, a, b), factors) if factors else const(1)


def _of_operations(value: Node) -> Node:
    return of_operations(value, value.op in WAVES and is_made_of(value, _FORESEEN))


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


def _numeric(value: Node) -> Node:
    return node(Op.WHERE, value, const(1), const(0)) if is_boolean(value) else value


def _truth(value: Node) -> Node:
    return value if is_boolean(value) else node(Op.NE, value, const(0))


def _numeric_operands(value: Node) -> Node:
    """Operands of the right kind: truth values as 1 and 0 where numbers belong, and numbers as truth values."""
    if value.op.kind is Kind.LOGIC:
        return node(value.op, *map(_truth, value.args))
    if value.op is Op.WHERE:
        same = is_boolean(value.args[1]) == is_boolean(value.args[2])
        return node(Op.WHERE, _truth(value.args[0]), *(value.args[1:] if same else map(_numeric, value.args[1:])))
    return node(value.op, *map(_numeric, value.args), value.arg) if any(map(is_boolean, value.args)) else value


def _leaves(rule: RuleData, states: Mapping[str, Any], memory: Memory) -> dict[str, Node]:
    """The value of each name before the first line."""
    leaves = {fact: node(Op.FACT, fact) for fact in FACTS}
    leaves |= {key: node(Op.HYPER, key) for key in rule.hyper}
    leaves |= {key: node(Op.LOAD, key) for key in (*states, *rule.inputs)}
    return leaves | {"g": node(Op.LOAD, "g"), "grad": node(Op.LOAD, "g"), "p": weight(memory), "t": node(Op.STEP)}


def is_made_of(value: Node, leaves: Container[Op]) -> bool:
    """Whether a value is arithmetic on these leaves alone."""
    return all(n.op in leaves if n.op.kind is Kind.LEAF else n.op in NUMPY for n in walk([value]))


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
    skip = None if rule.skip is None else _truth(lowering.expression(rule.skip))
    if skip is not None:
        lowering.note_sites(skip, "skip")
    stores = []
    for key in (*states, "p"):
        value, old = _numeric(lowering.values[key]), before[key]
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
        buffers.append(Buffer(key, "state", axes.buffers[key], _numeric(resolve.expression(state.init))))
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
        sites=lowering.sites, counts=tuple(_foreseen(count, rule) for count in counts), parts=parts,
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
        value = _numeric(lowering.expression(statistic.value))
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


def _foreseen(count: Count, rule: RuleData) -> Count:
    """The same count; RuleError where it is not known before a step, or a `fixed` one not when a kernel is made."""
    leaves = (Op.CONST, Op.FACT, Op.HYPER) if count.fixed else _FORESEEN
    for value in count.values:
        if not is_made_of(value, leaves):
            parts = f"hyper-parameters{'' if count.fixed else ', t'}"
            raise rule_error(
                f"{count.what} must be known before a step: make it of numbers, {parts} and shape facts", count.span
            )
        differing = [str(n.arg) for n in walk([value]) if n.op is Op.FACT and n.arg in NUMBERS]
        if differing and count.fixed:
            raise rule_error(
                f"{count.what} depends on {differing[0]}, which differs between tensors of one kernel: make it of "
                f"numbers, static hyper-parameters and shape facts", count.span,
            )  # fmt: skip
        moving = [str(n.arg) for n in walk([value]) if n.op is Op.HYPER and not rule.hyper[str(n.arg)].static]
        if moving and count.fixed:
            raise rule_error(
                f"{count.what} depends on {moving[0]}, which may change between steps: declare {moving[0]} static",
                count.span,
            )
    return count


def check_counts(program: Program, known: Mapping[str, float]) -> Program:
    """The same program; RuleError at the place of a count outside its range at these values.

    `known` has values of hyper-parameters and of shape facts. Counts of other values are not checked.
    """
    for count in program.counts:
        if problem := count.problem(known):
            raise rule_error(problem, count.span)
    return program


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
