"""The flow of a step: one expression for each result, that is every state and the parameter, over the values before it.

`Fact` is the answer of an analysis: yes with a proof, no with a counterexample, or unknown, and the line that decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rulec.language.evaluations import standalone
from rulec.language.expr.node import Kind, Node, Op, const, is_boolean, name, node, rewrite, walk
from rulec.language.expr.text import expression_text
from rulec.language.rule_data import Assign, Branch, RuleData, Statement
from rulec.language.source import Span

#: Longest text of a line that is shown whole.
_WIDTH = 100


@dataclass(frozen=True)
class Flow:
    """The results of a step.

    `rule` is the rule as it runs by itself. `new` has the value of `p` and of every state after the step, over the
    names of values before it: `g` (the raw gradient), `p`, `t`, states, hyper-parameters, inputs and shape facts. The
    arms of an `if` are merged by `where`, and so is a skipped step; `taken` has the values after a step without a
    skip. `lines` maps a value to the lines it is written in, `assigned` a name to the last line that assigns it.
    """

    rule: RuleData
    new: Mapping[str, Node]
    taken: Mapping[str, Node]
    lines: Mapping[Node, Sequence[Line]]
    assigned: Mapping[str, Line]

    def line(self, value: Node, target: str = "") -> Line | None:
        """The line that computes `value`: the last line of `target` where it is among them, else the first of them."""
        lines = self.lines.get(value, ())
        last = self.assigned.get(target)
        return last if last in lines else next(iter(lines), None)


@dataclass
class _Walk:
    values: dict[str, Node]
    lines: dict[Node, list[Line]] = field(default_factory=dict)
    assigned: dict[str, Line] = field(default_factory=dict)

    def expression(self, value: Node, line: Line) -> Node:
        """The expression of a line over the values before the step."""
        done: dict[Node, Node] = {}
        result = rewrite([value], lambda n: self.values.get(str(n.arg), n) if n.op is Op.NAME else n, done)[0]
        for written, part in done.items():
            if written.op.kind is not Kind.LEAF:
                self.lines.setdefault(part, []).append(line)
        return result

    def statements(self, step: Iterable[Statement]) -> None:
        for line in step:
            if isinstance(line, Assign):
                shown = _shown(f"{line.target} = {expression_text(line.value)}", line.span)
                self.values[line.target] = self.expression(line.value, shown)
                self.assigned[line.target] = shown
            else:
                self.branch(line)

    def branch(self, line: Branch) -> None:
        shown = _shown(f"if {expression_text(line.condition)}", line.span)
        condition = self.expression(line.condition, shown)
        before = dict(self.values)
        self.statements(line.then)
        then, self.values = self.values, dict(before)
        self.statements(line.otherwise)
        for key, other in self.values.items():
            if key in then and then[key] is not other:
                self.values[key] = node(Op.WHERE, condition, number(then[key]), number(other))
                self.lines.setdefault(self.values[key], []).append(shown)


def _shown(text: str, span: Span | None) -> Line:
    return Line(text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}...", span)


def number(value: Node) -> Node:
    """A truth value as 1 or 0; a number unchanged."""
    return node(Op.WHERE, value, const(1), const(0)) if is_boolean(value) else value


def flow_of(rule: RuleData) -> Flow:
    """The flow of a rule; RuleError for a wrapper around no rule, and for a hyper-parameter without a default."""
    alone = standalone(rule)
    walked = _Walk({"grad": name("g"), **{key: name(key) for key in (*alone.state, "p")}})
    walked.statements(alone.step)
    taken = {key: number(walked.values[key]) for key in (*alone.state, "p")}
    new = dict(taken)
    if alone.skip is not None:
        line = _shown(f"skip: {expression_text(alone.skip)}", None)
        skip = walked.expression(alone.skip, line)
        new |= {key: node(Op.WHERE, skip, name(key), x) for key, x in taken.items() if x is not name(key)}
        walked.lines.update({new[key]: [line] for key in new if new[key] is not taken[key]})
    return Flow(alone, new, taken, walked.lines, walked.assigned)


def reads(value: Node, names: Iterable[str]) -> bool:
    """Whether any of the names stands in `value`."""
    wanted = {name(key) for key in names}
    return any(part in wanted for part in walk([value]))


Answer = Literal["yes", "no", "unknown"]


@dataclass(frozen=True)
class Line:
    """A line of a step as text, and its place where the rule was read from a file."""

    text: str
    span: Span | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"`{self.text}`"


@dataclass(frozen=True)
class Fact:
    """One answer about a rule, and why.

    `yes` is proved from the expressions, under the conditions in `where`, such as `eps = 0`. `no` is refuted by a
    counterexample in numbers. `unknown` is neither. `line` is the line where the property comes to hold, or where the
    proof ends. The proofs are about real numbers: rounding, overflow and infinite gradients are outside of them. As a
    truth value, a Fact is true only for a yes without conditions.
    """

    answer: Answer
    why: str = ""
    where: tuple[str, ...] = ()
    line: Line | None = None

    def __bool__(self) -> bool:
        return self.answer == "yes" and not self.where

    def __str__(self) -> str:
        head = f"where {' and '.join(self.where)}" if self.where else self.answer
        reason = " ".join(x for x in (self.why, str(self.line) if self.line else "") if x)
        return f"{head}: {reason}" if reason else head
