"""The lines of a step: their text into statements, and statements back into text."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rulec.language.check import target_problem
from rulec.language.expression import ExpressionParser, dotted
from rulec.language.located import Text
from rulec.language.names import BASE_NAMES, short
from rulec.language.node import Node, Op, name, node
from rulec.language.rule import Assign, Branch, Rule, Statement
from rulec.language.source import Span, did_you_mean, rule_error
from rulec.language.text import expression_text

#: Deepest nesting of `if` in a step.
MAX_BRANCHES = 20


@dataclass
class Scope:
    """The names in reach of a step's lines.

    `rule` has the hyper-parameters, states and inputs; `uses` the rules to call, by name. `called` has the place of
    each call read so far.
    """

    rule: Rule
    uses: Mapping[str, Rule] = field(default_factory=dict)
    called: dict[str, Span] = field(default_factory=dict)


class StepParser:
    """Reads the text of a step, and inlines calls of the rules under `uses` in place."""

    def __init__(self, text: Text, scope: Scope) -> None:
        self.text = text
        self.scope = scope
        self.known = {*BASE_NAMES, *scope.rule.hyper, *scope.rule.state, *scope.rule.inputs}
        self.targets: set[str] = set()
        self.seen: set[str] = set()
        self.blocks: list[list[Statement]] = [[]]
        self.expressions = ExpressionParser(text, self.known, self._inline_call, self._explain)

    def parse(self) -> tuple[Statement, ...]:
        """The statements of the whole text."""
        body = self.text.parse()
        if not body:
            raise rule_error("the step is empty: end it with direction = ...", self.text.start)
        self.targets = {target for tree in body for target in _targets(tree)}
        self._statements(body)
        wraps = self.scope.rule.wraps
        if wraps and wraps not in self.scope.called:
            message = f"{wraps} is never called: write {wraps}(g), and {wraps}.p for the parameter it gives"
            raise rule_error(message, self.text.start)
        return tuple(self.blocks[0])

    def _statements(self, body: list[ast.stmt]) -> None:
        for tree in body:
            if isinstance(tree, ast.Assign):
                self._assign(tree)
            elif isinstance(tree, ast.If):
                self._branch(tree)
            elif isinstance(tree, ast.Expr) and self._is_inner_call(tree.value):
                self.expressions.parse(tree.value)
            else:
                raise rule_error(_no_line(tree), self.text.span(tree))

    def _assign(self, tree: ast.Assign) -> None:
        target = dotted(tree.targets[0]) if len(tree.targets) == 1 else None
        if target is None:
            raise rule_error("assign one name at a time", self.text.span(tree))
        problem = target_problem(self.scope.rule, target)
        if problem:
            raise rule_error(problem, self.text.span(tree.targets[0]))
        value = self.expressions.parse(tree.value)
        self.blocks[-1].append(Assign(target, value, self.text.span(tree)))
        self.known.add(target)
        self.seen.add(target)

    def _is_inner_call(self, tree: ast.expr) -> bool:
        wraps = self.scope.rule.wraps
        return bool(wraps) and isinstance(tree, ast.Call) and dotted(tree.func) == wraps

    def _explain(self, identifier: str) -> str:
        """The mistake behind a name without a value here, as a sentence; empty where a known name is similar."""
        wraps = self.scope.rule.wraps
        if identifier == wraps:
            return f"{wraps!r} is the rule that is wrapped: write {wraps}(g)"
        if wraps and identifier == f"{wraps}.p" and self.scope.rule.wraps_shape is not None:
            return f"{identifier!r} has no value: {wraps} has a shape of its own, so use the direction, {wraps}(g)"
        if wraps and identifier in (f"{wraps}.p", f"{wraps}.direction"):
            where = "in the same branch" if wraps in self.scope.called else "above this line"
            return f"{identifier!r} has no value here: write {wraps}(g) {where}"
        if identifier in self.seen:
            return f"{identifier!r} is assigned in one branch only: assign it in the other too"
        if identifier in self.scope.uses:
            return f"{identifier!r} is a rule: write {identifier}(g)"
        if identifier in self.targets:
            return f"{identifier!r} is used before it is assigned: move its line up"
        if did_you_mean(identifier, self.known):
            return ""
        return f"unknown name {short(identifier)}: declare it under hyper or state, or assign it first"

    def _branch(self, tree: ast.If) -> None:
        if len(self.blocks) > MAX_BRANCHES:
            raise rule_error(f"if is nested deeper than {MAX_BRANCHES} levels", self.text.span(tree.test))
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

    def _inline_call(self, called: str, args: list[Any], span: Span, keywords: dict[str, Node]) -> Node | None:
        wrapped = bool(called) and called == self.scope.rule.wraps
        rule = self.scope.uses.get(called)
        if rule is None and not wrapped:
            return None
        if len(args) != 1 or not isinstance(args[0], Node):
            raise rule_error(f"a rule is called with its one input: {called}(g)", span)
        if called in self.scope.called and wrapped:
            raise rule_error(
                f"{called} is called a second time, and both calls would share its states: call it once", span
            )
        if called in self.scope.called:
            raise rule_error(
                f"{called} is called a second time, and both calls would share its states: "
                f"name it twice under uses, as {{first: {called}, second: {called}}}", span,
            )  # fmt: skip
        from rulec.language.compose import count_draws, inline

        self.scope.called[called] = span
        if rule is None:
            count = keywords.pop("t", name("t"))
            for keyword in keywords:
                raise rule_error(
                    f"{called} has no argument {keyword!r}: write {called}(g), or {called}(g, t=t/2)", span
                )
            self.blocks[-1].append(Assign(called, node(Op.CALL, args[0], count, called), span))
            self.known |= {f"{called}.direction"} | ({f"{called}.p"} if self.scope.rule.wraps_shape is None else set())
            return name(f"{called}.direction")
        self.blocks[-1].extend(inline(rule, called, args[0], self.expressions.next_draw))
        self.expressions.next_draw += count_draws(rule)
        return name(f"{called}.direction")


def _targets(tree: ast.stmt) -> Iterable[str]:
    """The targets of a statement, also inside its branches."""
    stack = [tree]
    while stack:
        current = stack.pop()
        if isinstance(current, ast.If):
            stack += [*current.body, *current.orelse]
        elif isinstance(current, ast.Assign):
            yield from (target for t in current.targets if (target := dotted(t)))


def _no_line(tree: ast.stmt) -> str:
    """Why a statement is no line of a step."""
    target = dotted(tree.target) if isinstance(tree, ast.AugAssign) else None
    if target:
        return f"this line is not part of a step: write {target} = {target} ... in full"
    if isinstance(tree, ast.Expr):
        return "this line assigns nothing: write name = expression"
    return "this line is not part of a step: write name = expression, or if and else"


def step_text(step: Iterable[Statement], indent: str = "") -> str:
    """The lines of a step as text. Reading the text gives the same statements."""
    lines = []
    for line in step:
        if isinstance(line, Assign):
            # A wrapper's call of the rule it wraps gives several names a value, so it stands alone.
            target = "" if line.value.op is Op.CALL else f"{line.target} = "
            lines.append(f"{indent}{target}{expression_text(line.value)}")
        else:
            lines.append(f"{indent}if {expression_text(line.condition)}:")
            lines.append(step_text(line.then, indent + "  "))
            if line.otherwise:
                lines.append(f"{indent}else:")
                lines.append(step_text(line.otherwise, indent + "  "))
    return "\n".join(lines)
