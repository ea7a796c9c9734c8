"""A step as one expression per result: every state and the parameter after the step, in terms of before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rulec.analysis.fact import Line
from rulec.language.node import Kind, Node, Op, const, is_boolean, name, node, rewrite, walk
from rulec.language.rule import Assign, Branch, Rule, Statement
from rulec.language.source import Span
from rulec.language.text import expression_text

#: Longest text of a line that is shown whole.
_WIDTH = 100


@dataclass(frozen=True)
class Flow:
    """What a step computes.

    `rule` is the rule as it runs by itself. `new` has the value after the step of `p` and of every state, over the
    names of what there was before it: `g` (the raw gradient), `p`, `t`, states, hyper-parameters, inputs and shape
    facts. The arms of an `if` are merged by `where`, and so is a skipped step; `taken` has the values after a step
    that is not skipped. `lines` has the lines that each value is written in, `assigned` the last line that assigns each
    name.
    """

    rule: Rule
    new: Mapping[str, Node]
    taken: Mapping[str, Node]
    lines: Mapping[Node, Sequence[Line]]
    assigned: Mapping[str, Line]

    def line(self, value: Node, target: str = "") -> Line | None:
        """The line that computes `value`: the one that assigns `target` where it does, else the first."""
        found = self.lines.get(value, ())
        own = self.assigned.get(target)
        return own if own in found else next(iter(found), None)


@dataclass
class _Walk:
    values: dict[str, Node]
    lines: dict[Node, list[Line]] = field(default_factory=dict)
    assigned: dict[str, Line] = field(default_factory=dict)

    def expression(self, value: Node, line: Line) -> Node:
        """The expression of a line over the values of before the step."""
        made: dict[Node, Node] = {}
        found = rewrite([value], lambda n: self.values.get(str(n.arg), n) if n.op is Op.NAME else n, made)[0]
        for written, part in made.items():
            if written.op.kind is not Kind.LEAF:
                self.lines.setdefault(part, []).append(line)
        return found

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
    """A truth value as 1 or 0; a number as it is."""
    return node(Op.WHERE, value, const(1), const(0)) if is_boolean(value) else value


def flow_of(rule: Rule) -> Flow:
    """The flow of a rule; RuleError for a wrapper that wraps nothing yet, and for what has no default."""
    alone = rule.standalone()
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
    """Whether any of these names stands in `value`."""
    wanted = {name(key) for key in names}
    return any(part in wanted for part in walk([value]))
