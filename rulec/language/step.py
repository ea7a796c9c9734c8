"""The lines of a step: their text into statements, and statements back into text."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rulec.language.expression import CONSTANTS, ExpressionParser, Text, dotted
from rulec.language.node import FACTS, Node, name
from rulec.language.rule import Assign, Branch, Rule, Statement
from rulec.language.source import Span, rule_error
from rulec.language.text import expression_text

#: Names with a meaning of their own, and why they cannot be assigned or declared. A function's name may be taken:
#: functions are called and values are not (Adafactor has a hyper-parameter `clip`).
RESERVED: dict[str, str] = {
    "g": "the gradient",
    "grad": "the raw gradient",
    "t": "the step count",
    **dict.fromkeys(FACTS, "a shape fact"),
    **dict.fromkeys(CONSTANTS, "a constant"),
}

#: What every step may read besides hyper-parameters, states, inputs and its own locals.
BASE_NAMES = ("g", "grad", "p", "t", *FACTS)


@dataclass
class Scope:
    """What the lines of a step may name, and what they have inlined so far."""

    hyper: Iterable[str]
    state: Iterable[str]
    inputs: Iterable[str] = ()
    uses: Mapping[str, Rule] = field(default_factory=dict)
    called: dict[str, Span] = field(default_factory=dict)


class StepParser:
    """Reads the text of a step; calls of the rules under `uses` are inlined where they stand."""

    def __init__(self, text: Text, scope: Scope) -> None:
        self.text = text
        self.scope = scope
        self.known = {*BASE_NAMES, *scope.hyper, *scope.state, *scope.inputs}
        self.blocks: list[list[Statement]] = [[]]
        self.expressions = ExpressionParser(text, self.known, self._inline_call)

    def parse(self) -> tuple[Statement, ...]:
        """The statements of the whole text."""
        body = self.text.parse()
        if not body:
            raise rule_error("the step is empty: end it with direction = ...", self.text.place(1, 0))
        self._statements(body)
        return tuple(self.blocks[0])

    def _statements(self, body: list[ast.stmt]) -> None:
        for tree in body:
            if isinstance(tree, ast.Assign):
                self._assign(tree)
            elif isinstance(tree, ast.If):
                self._branch(tree)
            else:
                wanted = "write name = expression, or if/else"
                if isinstance(tree, ast.AugAssign):
                    target = ast.unparse(tree.target)
                    wanted = f"write {target} = {target} ... in full"
                raise rule_error(f"this line is not part of a step: {wanted}", self.text.span(tree))

    def _assign(self, tree: ast.Assign) -> None:
        target = dotted(tree.targets[0]) if len(tree.targets) == 1 else None
        if target is None:
            raise rule_error("assign one name at a time", self.text.span(tree))
        self._check_target(target, self.text.span(tree.targets[0]))
        value = self.expressions.parse(tree.value)
        self.blocks[-1].append(Assign(target, value, self.text.span(tree)))
        self.known.add(target)

    def _check_target(self, target: str, span: Span) -> None:
        if target in RESERVED:
            raise rule_error(f"{target!r} is {RESERVED[target]} and cannot be assigned", span)
        if target in self.scope.hyper:
            raise rule_error(f"{target!r} is a hyper-parameter and cannot be assigned: use another name", span)
        if target in self.scope.inputs:
            raise rule_error(f"{target!r} is an input and cannot be assigned", span)

    def _branch(self, tree: ast.If) -> None:
        condition = self.expressions.parse(tree.test)
        before = set(self.known)
        then, after_then = self._block(tree.body, before)
        otherwise, after_otherwise = self._block(tree.orelse, before)
        # A local of one branch only has no value after the other.
        self.known.clear()
        self.known.update(after_then & after_otherwise)
        self.blocks[-1].append(Branch(condition, then, otherwise, self.text.span(tree.test)))

    def _block(self, body: list[ast.stmt], before: set[str]) -> tuple[tuple[Statement, ...], set[str]]:
        self.known.clear()
        self.known.update(before)
        self.blocks.append([])
        self._statements(body)
        return tuple(self.blocks.pop()), set(self.known)

    def _inline_call(self, called: str, values: list[Node], args: list[object], span: Span) -> Node | None:
        rule = self.scope.uses.get(called)
        if rule is None:
            return None
        if len(args) != 1 or len(values) != 1:
            raise rule_error(f"a rule is called with its one input: {called}(g)", span)
        if called in self.scope.called:
            raise rule_error(
                f"{called} is called a second time, and both would share its states: "
                f"name it twice under uses, as {{first: {called}, second: {called}}}", span,
            )  # fmt: skip
        from rulec.language.compose import inline

        self.scope.called[called] = span
        self.blocks[-1].extend(inline(rule, called, values[0]))
        return name(f"{called}.direction")


def step_text(step: Iterable[Statement], indent: str = "") -> str:
    """The lines of a step as text that reads back to the same statements."""
    lines = []
    for line in step:
        if isinstance(line, Assign):
            lines.append(f"{indent}{line.target} = {expression_text(line.value)}")
        else:
            lines.append(f"{indent}if {expression_text(line.condition)}:")
            lines.append(step_text(line.then, indent + "  "))
            if line.otherwise:
                lines.append(f"{indent}else:")
                lines.append(step_text(line.otherwise, indent + "  "))
    return "\n".join(lines)
