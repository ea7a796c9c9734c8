"""A step as one expression per result: every state and the parameter after the step, in terms of before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rulec.analysis.fact import Line
from rulec.errors import RuleError
from rulec.language.node import Kind, Node, Op, const, is_boolean, name, node, rewrite, walk
from rulec.language.rule import Assign, Rule, Statement
from rulec.language.source import Span
from rulec.language.text import expression_text

#: Longest text of a line that is shown whole.
_WIDTH = 100


@dataclass(frozen=True)
class Flow:
    """What a step computes.

    `rule` is the rule as it runs by itself. `new` has the value after the step of `p` and of every state, over the
    names of what there was before it: `g` (the raw gradient), `p`, `t`, states, hyper-parameters, inputs and shape
    facts. The arms of an `if` are merged by `where`, and so is a skipped step. `lines` has the line that each value
    first appears in, `assigned` the last line that assigns each name.
    """

    rule: Rule
    new: Mapping[str, Node]
    lines: Mapping[Node, Line]
    assigned: Mapping[str, Line]

    def line(self, value: Node) -> Line | None:
        """The line that computes `value`, if one does."""
        return self.lines.get(value)


@dataclass
class _Walk:
    values: dict[str, Node]
    lines: dict[Node, Line] = field(default_factory=dict)
    assigned: dict[str, Line] = field(default_factory=dict)

    def expression(self, value: Node) -> Node:
        return rewrite([value], lambda n: self.values.get(str(n.arg), n) if n.op is Op.NAME else n)[0]

    def note(self, value: Node, text: str, span: Span | None) -> Line:
        shown = Line(text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}...", span)
        for part in list(walk([value], self.lines)):
            if part.op.kind is not Kind.LEAF:
                self.lines[part] = shown
        return shown

    def statements(self, step: Iterable[Statement]) -> None:
        for line in step:
            if isinstance(line, Assign):
                value = self.expression(line.value)
                text = f"{line.target} = {expression_text(line.value)}"
                self.assigned[line.target] = self.note(value, text, line.span)
                self.values[line.target] = value
                continue
            condition = self.expression(line.condition)
            text = f"if {expression_text(line.condition)}"
            self.note(condition, text, line.span)
            before = dict(self.values)
            self.statements(line.then)
            then, self.values = self.values, dict(before)
            self.statements(line.otherwise)
            for key in then.keys() & self.values.keys():
                if then[key] is not self.values[key]:
                    self.values[key] = node(Op.WHERE, condition, number(then[key]), number(self.values[key]))
                    self.note(self.values[key], text, line.span)


def number(value: Node) -> Node:
    """A truth value as 1 or 0; a number as it is."""
    return node(Op.WHERE, value, const(1), const(0)) if is_boolean(value) else value


def flow_of(rule: Rule) -> Flow:
    """The flow of a rule; RuleError for a wrapper that wraps nothing yet, and for what has no default."""
    if any(n.op.kind is Kind.CALL for n in walk(rule.expressions)):
        raise RuleError(f"{rule.name} is a wrapper: analyse it around a rule")
    alone = rule.standalone()
    walked = _Walk({"grad": name("g"), **{key: name(key) for key in (*alone.state, "p")}})
    walked.statements(alone.step)
    new = {key: number(walked.values[key]) for key in (*alone.state, "p")}
    if alone.skip is not None:
        skip = walked.expression(alone.skip)
        for key, value in new.items():
            if value is not name(key):
                new[key] = node(Op.WHERE, skip, name(key), value)
                walked.note(new[key], f"skip: {expression_text(alone.skip)}", None)
    return Flow(alone, new, walked.lines, walked.assigned)


def reads(value: Node, names: Iterable[str]) -> bool:
    """Whether any of these names stands in `value`."""
    wanted = {name(key) for key in names}
    return any(part in wanted for part in walk([value]))
