"""The lines of a step: their text into statements, and statements back into text."""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rulec.errors import RuleError
from rulec.language.check import MAX_LINES, target_problem
from rulec.language.compose.combine import free_name
from rulec.language.dimensions import Dimensions, Pass
from rulec.language.evaluations import gradient_of
from rulec.language.expr.arithmetic import number_known
from rulec.language.expr.functions import PAIRS
from rulec.language.expr.names import BASE_NAMES, RESERVED, RESULTS, name_problem, short
from rulec.language.expr.node import Node, Op, name, names_in, node
from rulec.language.expr.static import settings
from rulec.language.expr.text import expression_text
from rulec.language.parse.expression import ExpressionParser, dotted
from rulec.language.parse.located import Text
from rulec.language.rule_data import Assign, Branch, RuleData, Statement, Statistic
from rulec.language.sizes import entries
from rulec.language.source import Mistakes, Span, did_you_mean, rule_error

#: Deepest nesting of `if` in a step.
MAX_BRANCHES = 20


@dataclass
class Scope:
    """The names in reach of a step's lines.

    `rule` has the hyper-parameters, states and inputs; `uses` the rules to call, by name. `lists` has the lengths of
    lists, `histories` the names of histories, and `counts` the values of static hyper-parameters. `dimensions` gives
    the numbers of dimensions of the rule's tensors. `called` has the place of each call read so far.
    """

    rule: RuleData
    uses: Mapping[str, RuleData] = field(default_factory=dict)
    lists: Mapping[str, int] = field(default_factory=dict)
    histories: Container[str] = ()
    counts: Mapping[str, float] = field(default_factory=dict)
    dimensions: Callable[[], Dimensions] = Dimensions
    called: dict[str, Span] = field(default_factory=dict)
    #: The statistics of the rules called so far, by their names in the step.
    statistics: dict[str, Statistic] = field(default_factory=dict)


class StepParser:
    """Reads the text of a step, and inlines calls of the rules under `uses` in place."""

    def __init__(self, text: Text, scope: Scope, mistakes: Mistakes | None = None) -> None:
        self.text, self.scope, self.mistakes = text, scope, mistakes or Mistakes()
        self.known = {*BASE_NAMES, *scope.rule.hyper, *scope.rule.state, *scope.rule.inputs}
        self.known |= {*map(gradient_of, scope.rule.passes)}
        self.targets: set[str] = set()
        self.seen: set[str] = set()
        self.blocks: list[list[Statement]] = [[]]
        self.expressions = ExpressionParser(text, self.known, self._inline_call, self._explain)
        self.expressions.lists, self.expressions.counts = dict(scope.lists), scope.counts
        #: The lines and passes of loops so far.
        self.passes, self.looped = 0, False

    def parse(self) -> tuple[Statement, ...]:
        """The statements of the whole text."""
        body: list[ast.stmt] = []
        with self.mistakes.part():
            body = self.text.parse()
            if not body:
                raise rule_error("the step is empty: end it with direction = ...", self.text.start)
        self.targets = {target for tree in body for target in _targets(tree)}
        self._statements(body)
        self.mistakes.check()
        for call in self.scope.rule.wraps:
            if call not in self.scope.called:
                message = f"{call} is never called: write {call}(g), and {call}.p for the parameter it gives"
                raise rule_error(message, self.text.start)
        return tuple(self.blocks[0])

    def _statements(self, body: list[ast.stmt]) -> None:
        for tree in body:
            with self.mistakes.part():
                self._statement(tree)
                continue
            # Lines below may read these names: one mistake is one message.
            self.known.update(_targets(tree))
            self.seen.update(_targets(tree))

    def _statement(self, tree: ast.stmt) -> None:
        if isinstance(tree, ast.Assign):
            self._assign(tree)
        elif isinstance(tree, ast.If):
            self._branch(tree)
        elif isinstance(tree, ast.For):
            self._loop(tree)
        elif isinstance(tree, ast.Expr) and self._is_inner_call(tree.value):
            self.expressions.parse(tree.value)
        else:
            raise rule_error(_no_line(tree), self.text.span(tree))

    def _assign(self, tree: ast.Assign) -> None:
        if len(tree.targets) == 1 and isinstance(tree.targets[0], ast.Tuple):
            self._assign_both(tree, tree.targets[0].elts)
            return
        target = self._target(tree)
        if problem := self._target_problem(target):
            raise rule_error(problem, self.text.span(tree.targets[0]))
        value = self.expressions.parse(tree.value)
        if target in self.scope.histories:
            self._push(target, value, self.text.span(tree))
        else:
            self._line(target, value, self.text.span(tree))

    def _assign_both(self, tree: ast.Assign, targets: Sequence[ast.expr]) -> None:
        """The lines of a function with two results: `q, r = qr(x)`."""
        span, names = self.text.span(tree), [dotted(target) for target in targets]
        call = tree.value
        is_pair = isinstance(call, ast.Call) and dotted(call.func) in {op.symbol for op in PAIRS}
        if len(names) != 2 or None in names or not is_pair:
            raise rule_error(
                "assign one name at a time: two results have q, r = qr(x) and values, vectors = eigh(x) alone", span
            )
        for target, identifier in zip(targets, names, strict=True):
            if problem := self._target_problem(str(identifier)):
                raise rule_error(problem, self.text.span(target))
        value = self.expressions.parse(call)
        if value.op not in PAIRS:
            called = settings(value)["function"]
            raise rule_error(f"{called} of blocks has one result: write {names[0]} = {called}(...)", span)
        inside = names_in([value])
        if {*names} <= {*inside}:
            raise rule_error("both names stand in the matrix too: give it a name of its own first", span)
        both = zip(names, PAIRS[value.op](value, value.args[0]), strict=True)
        # A name in the matrix means its value before the line, and is assigned last.
        for identifier, result in sorted(both, key=lambda each: each[0] in inside):
            self._line(str(identifier), result, span)

    def _target(self, tree: ast.Assign) -> str:
        left = tree.targets[0]
        if len(tree.targets) == 1 and isinstance(left, ast.Subscript):
            base = dotted(left.value)
            if base in self.scope.histories:
                message = f"{base!r} is a history: write {base} = ... to push a value, which is then {base}[0]"
                raise rule_error(message, self.text.span(left))
            return self.expressions.indexed(left, new=True)
        target = dotted(left) if len(tree.targets) == 1 else None
        if target is None:
            raise rule_error("assign one name at a time", self.text.span(tree))
        return target

    def _target_problem(self, target: str) -> str:
        """Why a line cannot assign this name, as a sentence; empty where it can."""
        if target in self.expressions.variables:
            return f"{target!r} is the variable of a loop and cannot be assigned: use another name"
        if target in self.scope.lists and target not in self.scope.histories:
            return f"{target!r} is a list: assign one entry of it, as {target}[0]"
        return target_problem(self.scope.rule, target)

    def _line(self, target: str, value: Node, span: Span) -> None:
        self.blocks[-1].append(Assign(target, value, span))
        self.known.add(target)
        self.seen.add(target)
        self._pass(span)

    def _pass(self, span: Span) -> None:
        """Counts a line, or a pass of a loop."""
        self.passes += 1
        if self.passes > MAX_LINES and self.looped:
            raise rule_error(f"this step has over {MAX_LINES} lines, its loops written out", span)

    def _push(self, history: str, value: Node, span: Span) -> None:
        """The lines that push a value to a history: every entry moves one place up, from the oldest on."""
        names = entries(history, self.scope.lists[history])
        if not {*names[1:]}.isdisjoint(names_in([value])):
            pushed = free_name(f"{history}_pushed", self.known)
            self._line(pushed, value, span)
            value = name(pushed)
        for newer, older in reversed([*pairwise(names)]):
            self._line(older, name(newer), span)
        self._line(names[0], value, span)

    def _loop(self, tree: ast.For) -> None:
        variable = tree.target.id if isinstance(tree.target, ast.Name) else ""
        problem = name_problem(variable) if variable else "a loop has one variable: write for i in range(3):"
        if variable in self.known or variable in self.expressions.lists or variable in self.expressions.variables:
            problem = f"{variable!r} has a value already: use another name for the variable of this loop"
        if problem or variable in RESERVED or variable in RESULTS:
            meaning = RESERVED.get(variable) or RESULTS.get(variable)
            problem = problem or f"{variable!r} is {meaning}: use another name for the variable of this loop"
            raise rule_error(problem, self.text.span(tree.target))
        if tree.orelse:
            raise rule_error("a loop has no else: leave it out", self.text.span(tree.orelse[0]))
        self.looped = True
        for number, condition in self._range(tree.iter):
            self._pass(self.text.span(tree.iter))
            self.expressions.variables[variable] = number
            if condition is None:
                self._statements(tree.body)
            else:
                self._fork(condition, tree.body, [], tree.iter)
        self.expressions.variables.pop(variable, None)

    def _range(self, tree: ast.expr) -> Sequence[Pass]:
        """The numbers of a range, each with the condition of the tensors that have this pass, None for all."""
        is_range = isinstance(tree, ast.Call) and dotted(tree.func) == "range" and not tree.keywords
        if not is_range or not 1 <= len(tree.args) <= 3:  # type: ignore[attr-defined]
            raise rule_error("a loop runs over a range: write for i in range(3):", self.text.span(tree))
        if any(isinstance(part, ast.Name) and part.id == "ndim" for part in ast.walk(tree)):
            return self._over_axes(tree.args, tree)  # type: ignore[attr-defined]
        ends = [self.expressions.count(end, "the end of a range") for end in tree.args]  # type: ignore[attr-defined]
        if len(ends) == 3 and ends[2] == 0:
            raise rule_error("the step of a range cannot be 0", self.text.span(tree))
        numbers = range(*ends)
        if max(map(abs, ends)) > MAX_LINES:
            raise rule_error(f"a loop runs at most {MAX_LINES} times", self.text.span(tree))
        return [(number, None) for number in numbers]

    def _over_axes(self, ends: Sequence[ast.expr], tree: ast.expr) -> Sequence[Pass]:
        """The numbers of `range(ndim)`, or of a range from another number up to an expression of `ndim`."""
        if len(ends) == 3:
            raise rule_error("a range over the axes of a tensor has no step: leave it out", self.text.span(ends[2]))
        start = self.expressions.count(ends[0], "the beginning of a range") if len(ends) == 2 else 0
        end = self.expressions.parse(ends[-1])
        self.expressions.counts_read.update(key for key in names_in([end]) if key in self.scope.counts)
        with self._at(tree):
            return self.scope.dimensions().passes(start, end, self.scope.counts)

    @contextmanager
    def _at(self, tree: ast.AST) -> Iterator[None]:
        """Gives an error without a place that of a construct."""
        try:
            yield
        except RuleError as error:
            if error.place:
                raise
            raise rule_error(error.message, self.text.span(tree), error.code) from None

    def _is_inner_call(self, tree: ast.expr) -> bool:
        return isinstance(tree, ast.Call) and dotted(tree.func) in self.scope.rule.wraps

    def _explain(self, identifier: str) -> str:
        """The mistake behind a name without a value here, as a sentence; empty where a known name is similar."""
        call = identifier.partition(".")[0]
        wrapped = call in self.scope.rule.wraps
        if wrapped and identifier == call:
            return f"{call!r} is the rule that is wrapped: write {call}(g)"
        if wrapped and identifier == f"{call}.p" and self.scope.rule.wraps_shape is not None:
            return f"{identifier!r} has no value: {call} has a shape of its own, so use the direction, {call}(g)"
        if wrapped and identifier in (f"{call}.p", f"{call}.direction"):
            where = "in the same branch" if call in self.scope.called else "above this line"
            return f"{identifier!r} has no value here: write {call}(g) {where}"
        if identifier in self.seen:
            return f"{identifier!r} is assigned in one branch only: assign it in the other too"
        if identifier in self.scope.rule.passes:
            return f"{identifier!r} is a pass: write {gradient_of(identifier)} for the gradient there"
        if identifier in self.scope.uses:
            return f"{identifier!r} is a rule: write {identifier}(g)"
        if identifier in self.targets:
            return f"{identifier!r} is used before it is assigned: move its line up"
        if did_you_mean(identifier, self.known):
            return ""
        return f"unknown name {short(identifier)}: declare it under hyper or state, or assign it first"

    def _branch(self, tree: ast.If) -> None:
        condition = self.expressions.parse(tree.test)
        decided = number_known(condition, {}) if self.expressions.variables else None
        if decided is not None:  # a condition on the variable of a loop
            self._statements(tree.body if decided else tree.orelse)
            return
        self._fork(condition, tree.body, tree.orelse, tree.test)

    def _fork(self, condition: Node, body: list[ast.stmt], orelse: list[ast.stmt], test: ast.expr) -> None:
        """A branch of these lines."""
        if len(self.blocks) > MAX_BRANCHES:
            raise rule_error(f"if is nested deeper than {MAX_BRANCHES} levels", self.text.span(test))
        before = set(self.known)
        then, after_then = self._block(body, before)
        otherwise, after_otherwise = self._block(orelse, before)
        # A local of one branch only has no value after the other.
        self.known.clear()
        self.known.update(after_then & after_otherwise)
        self.blocks[-1].append(Branch(condition, then, otherwise, self.text.span(test)))

    def _block(self, body: list[ast.stmt], before: set[str]) -> tuple[tuple[Statement, ...], set[str]]:
        self.known.clear()
        self.known.update(before)
        self.blocks.append([])
        self._statements(body)
        return tuple(self.blocks.pop()), set(self.known)

    def _inline_call(self, called: str, args: list[Any], span: Span, keywords: dict[str, Node]) -> Node | None:
        wrapped = called in self.scope.rule.wraps
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
        from rulec.language.compose.combine import count_draws, inline, statistics_inside

        self.scope.called[called] = span
        if rule is None:
            count, point = keywords.pop("t", name("t")), keywords.pop("p", name("p"))
            for keyword in keywords:
                raise rule_error(
                    f"{called} has no argument {keyword!r}: write {called}(g), or {called}(g, t=t/2, p=p)", span
                )
            self.blocks[-1].append(Assign(called, node(Op.CALL, args[0], count, point, called), span))
            self.known |= {f"{called}.direction"} | ({f"{called}.p"} if self.scope.rule.wraps_shape is None else set())
            return name(f"{called}.direction")
        self.blocks[-1].extend(inline(rule, called, args[0], self.expressions.next_draw))
        self.scope.statistics |= statistics_inside(rule, called, args[0])
        self.expressions.next_draw += count_draws(rule)
        return name(f"{called}.direction")


def _parts(target: ast.expr) -> Sequence[ast.expr]:
    """The names on the left of a line."""
    return target.elts if isinstance(target, ast.Tuple) else [target]


def _targets(tree: ast.stmt) -> Iterable[str]:
    """The targets of a statement, also inside its branches."""
    stack = [tree]
    while stack:
        current = stack.pop()
        if isinstance(current, ast.If | ast.For):
            stack += [*current.body, *current.orelse]
        elif isinstance(current, ast.Assign):
            yield from (target for t in current.targets for x in _parts(t) if (target := dotted(x)))


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
