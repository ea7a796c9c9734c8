"""The value of every line of a step: the rule gets one more state for each line, to keep the line's value.

So any backend can show its lines, by stores, and the values come from its own arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rulec.compiler.axes import AxisInference
from rulec.compiler.ir import COLS, ROWS, Axes
from rulec.compiler.lower import lower
from rulec.compiler.pipeline import DEFAULT_FACTS
from rulec.language.expr.node import Node, Op, const, dimension_of, name, node, rewrite
from rulec.language.expr.text import expression_text
from rulec.language.rule import Rule
from rulec.language.rule_data import Assign, Branch, State, Statement
from rulec.language.statistics import Watch
from rulec.tools.compare.oracle import largest_ulps
from rulec.tools.compare.sides import Array, EngineSide, Hyper, Inputs, MeasuringSide, ReferenceSide, Side, backend_side


@dataclass(frozen=True)
class Line:
    """One line of a step: its target, its text, and the state with its value.

    A `narrow` line has one value for all elements, as a bias correction has.
    """

    target: str
    text: str
    state: str
    narrow: bool = False


@dataclass(frozen=True)
class Lines:
    """A rule with states for its lines, and these lines in the order of execution."""

    rule: Rule
    lines: tuple[Line, ...]


def keep_lines(rule: Rule, shape: Sequence[int]) -> Lines:
    """The rule with extra states for the values of the lines, and the lines that run for a tensor of this shape."""
    from rulec.compiler.view import view_of

    rule = rule.in_one()
    prefix = "line"
    while any(key.startswith(prefix) for key in rule.state):
        prefix += "_"
    lines: list[Line] = []
    step = _with_copies(rule.step, prefix, lines)
    kept = {line.state: State(const(0)) for line in lines}
    facts = {**DEFAULT_FACTS, **view_of(rule, shape).facts}
    static = {k: h.default for k, h in rule.hyper.items() if h.static and isinstance(h.default, float)}
    program = lower(replace(rule, step=step, state={**rule.state, **kept}), facts, static)
    inference = AxisInference(program)
    stores = (s for stage in program.stages for s in stage.stores if s.buffer in kept)
    axes = {s.buffer: inference.axes(_assigned(s.buffer, s.value)) for s in stores}
    states = {key: _state(of_line) for key, of_line in axes.items()}
    ran = [replace(line, narrow=not set("bij") & set(axes[line.state].letters)) for line in lines if line.state in axes]
    return Lines(replace(rule, step=step, state={**rule.state, **states}), tuple(ran))


def _assigned(state: str, value: Node) -> Node:
    """The value of a line, without the branches around it that may keep the state."""
    kept = node(Op.LOAD, state)
    while value.op is Op.WIDEN or (value.op is Op.WHERE and kept in value.args[1:]):
        value = value.args[0] if value.op is Op.WIDEN else next(a for a in value.args[1:] if a is not kept)
    return value


def _with_copies(step: Sequence[Statement], prefix: str, lines: list[Line]) -> tuple[Statement, ...]:
    """The statements, each assignment followed by a copy of its value into a state for this line."""
    copied: list[Statement] = []
    for statement in step:
        if isinstance(statement, Branch):
            then = _with_copies(statement.then, prefix, lines)
            otherwise = _with_copies(statement.otherwise, prefix, lines)
            copied.append(replace(statement, then=then, otherwise=otherwise))
            continue
        text = f"{statement.target} = {expression_text(statement.value)}"
        lines.append(Line(statement.target, text, f"{prefix}{len(lines)}"))
        copied += [statement, Assign(lines[-1].state, name(statement.target))]
    return tuple(copied)


def _state(axes: Axes) -> State:
    """A state for a value with these axes: of the parameter's shape, or of a low-rank shape."""
    rows, cols = axes.rows or ROWS, axes.cols or COLS
    if rows is ROWS and cols is COLS:
        return State(const(0))
    return State(const(0), shape=(_as_text(rows), _as_text(cols)))


def _as_text(extent: Node) -> Node:
    """An extent of the compiler's as the expression an author would write."""

    def written(n: Node) -> Node:
        if n.op not in (Op.FACT, Op.HYPER):
            return n
        dimension = dimension_of(n.arg) if n.op is Op.FACT else None
        return name(str(n.arg)) if dimension is None else node(Op.DIM, const(dimension))

    return rewrite([extent], written)[0]


@dataclass(frozen=True)
class LineValue:
    """The value of one line in one step: by the reference, and by a backend where one ran."""

    line: Line
    reference: Array
    backend: Array | None

    def ulps(self, dtype: str) -> float | None:
        """The largest distance of an element, in ulps of the reference's value; None where no backend ran."""
        if self.backend is None:
            return None
        return largest_ulps(self.backend, self.reference, dtype)


@dataclass(frozen=True)
class StatisticValue:
    """A statistic of one step: by the numpy backend in float64, and by the backend of the run where there is one."""

    name: str
    reference: Array
    backend: Array | None


@dataclass(frozen=True)
class TracedStep:
    """One step of a trace: its gradient and inputs, the value of every line, and the statistics asked for."""

    gradient: Array
    inputs: Mapping[str, Array]
    values: tuple[LineValue, ...]
    statistics: tuple[StatisticValue, ...] = ()


def trace(
    kept: Lines, hyper: Hyper, param: Array, grads: Sequence[Array], backend: str | None,
    inputs: Sequence[Inputs] = (), watch: Watch = (),
) -> tuple[TracedStep, ...]:  # fmt: skip
    """Runs the lines over one tensor in the float64 reference, and beside it in a backend where one is named.

    `inputs` has the inputs of each step, for a rule with inputs, and `watch` the statistics to measure.
    """
    backends = [] if backend is None else [backend_side(kept.rule, [param.copy()], hyper, backend, watch)]
    sides: list[Side] = [ReferenceSide(kept.rule, [param.copy()], hyper), *backends]
    measuring = [EngineSide(kept.rule, [param.astype(np.float64)], hyper, "numpy", watch)] if watch else []
    steps = []
    for grad, beside in zip(grads, inputs or [{}] * len(grads), strict=True):
        for side in sides:
            side.step([grad.copy()], beside)
        for each in measuring:
            each.step([grad.astype(np.float64)], _in_float64(beside))
        states = [{k: v.copy() for k, v in side.values()[0].items()} for side in sides]
        values = [LineValue(line, *(s[line.state] for s in states), *[None] * (2 - len(states))) for line in kept.lines]
        shown = {k: np.asarray(v[0] if isinstance(v, list) else v) for k, v in beside.items()}
        watching = [*measuring, *backends] if watch else []
        steps.append(TracedStep(grad, shown, tuple(values), _statistics(watching)))
    return tuple(steps)


def _in_float64(inputs: Inputs) -> Inputs:
    return {k: [x.astype(np.float64) for x in v] if isinstance(v, list) else v for k, v in inputs.items()}


def _statistics(sides: Sequence[MeasuringSide]) -> tuple[StatisticValue, ...]:
    """The statistics of the last step, by the first side and by the second where there is one; of one tensor each."""
    measured = [side.statistics() for side in sides]
    values = [{name: np.asarray(next(iter(places.values()))) for name, places in each.items()} for each in measured]
    return tuple(
        StatisticValue(name, value, values[1][name] if values[1:] else None)
        for each in values[:1]
        for name, value in each.items()
    )
