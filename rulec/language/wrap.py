"""Wrappers: rules with a call of another rule in their step, as in `lookahead(adamw)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from rulec.errors import RuleError
from rulec.language import compose
from rulec.language.check import check_rule
from rulec.language.hyper import DEFAULT_LR, Hyper, well_known_range
from rulec.language.names import RESERVED
from rulec.language.node import Node, Op, name, names_in, node
from rulec.language.rule import Assign, Branch, Rule, State, Statement, assignments, conditions
from rulec.language.source import Span, rule_error


def wrap(wrapper: Rule, inner: Rule, rule_name: str | None = None) -> Rule:
    """The rule `wrapper(inner)`: the wrapper's lines, with the lines of `inner` in place of its call.

    Hyper-parameters and states of both are joined as in any composition. Raises RuleError where the two do not fit.
    """
    if not wrapper.wraps:
        raise RuleError(f"{wrapper.name} wraps no rule: did you mean {wrapper.called} >> {inner.called}?")
    inner.check_whole()
    joined = _wrapped(wrapper, inner, rule_name or compose.joined_name("", [wrapper, inner]))
    if joined.otherwise is None:
        return joined
    left = inner if wrapper.applies_to is None else wrapper
    return compose.routed(joined, left, lambda: _rest(wrapper, inner))


def _rest(wrapper: Rule, inner: Rule) -> Rule:
    """The rule for the tensors left out by one of the two."""
    if inner.rest is not None:
        return wrap(wrapper, inner.rest)
    assert wrapper.otherwise is not None  # one of the two has it
    rest = wrapper.otherwise.rule
    if rest is None:
        return inner
    return wrap(rest, inner) if rest.wraps else rest


def _wrapped(wrapper: Rule, inner: Rule, title: str) -> Rule:
    called = _Called(wrapper, inner)
    joined = Rule(
        name=title,
        step=tuple(called.lines()),
        hyper=compose.unify_hyper([(inner.name, called.hyper), (wrapper.name, wrapper.hyper)]),
        state={**called.inner.state, **called.wrapper.state},
        inputs=compose.unify_inputs([inner, wrapper]),
        **compose.single_attributes([called.wrapper, called.inner]),
    )
    taken = {*joined.hyper, *joined.inputs, *RESERVED, *(f"{called.key}.{n}" for n in ("g", "t", "p"))}
    return check_rule(compose.rename_all(joined, compose.short_names([inner, wrapper], called.keys[::-1], taken)))


class _Called:
    """A wrapper and the rule it wraps, their names kept apart by prefixes."""

    def __init__(self, wrapper: Rule, inner: Rule) -> None:
        self.wraps, self.title = wrapper.wraps, wrapper.name
        self.keys = compose.keys_of([wrapper, inner])
        self.key = self.keys[1]
        self.original = inner
        self.reads = wrapper.names_read
        # An lr in the direction was bound on purpose: behind a prefix it is not taken for a mistake.
        self.bound = not wrapper.assigns_parameter and wrapper.reads("lr")
        kept = () if self.bound else ("direction",)
        renames = {n: f"{self.keys[0]}.{n}" for n in compose.own_names(wrapper) if n not in kept}
        renames |= {f"{self.wraps}.{n}": f"{self.key}.{n}" for n in ("p", "direction")}
        self.wrapper = compose.rename_all(wrapper, renames)
        if f"{self.wraps}.direction" in self.reads and inner.assigns_parameter:
            line = next(line for line in assignments(inner.step) if line.target == "p")
            raise rule_error(
                f"{inner.name} assigns p itself, and {wrapper.name} needs the direction of the rule it wraps", line.span
            )
        inner = compose.shifted_draws(inner, compose.count_draws(wrapper))
        self.inner = compose.prefixed(inner, self.key)
        if wrapper.wraps_shape is not None:
            self.inner = _Shape(wrapper, wrapper.wraps_shape).fitted(self.inner, inner.name)
        self.hyper = dict(inner.hyper)
        if f"{self.wraps}.p" in self.reads and not inner.assigns_parameter:
            self.hyper.setdefault("lr", Hyper(DEFAULT_LR, **well_known_range("lr")))

    def lines(self) -> list[Statement]:
        """The wrapper's lines, with the wrapped rule's lines in place of its call."""
        lines = self._lines(self.wrapper.step, top=True)
        return [*lines, Assign("direction", name(f"{self.keys[0]}.direction"))] if self.bound else lines

    def _lines(self, step: Sequence[Statement], top: bool) -> list[Statement]:
        lines: list[Statement] = []
        for line in step:
            if isinstance(line, Branch):
                then, otherwise = self._lines(line.then, False), self._lines(line.otherwise, False)
                lines.append(replace(line, then=tuple(then), otherwise=tuple(otherwise)))
            elif line.value.op is Op.CALL:
                lines.extend(self._inlined(line.value, top))
            else:
                lines.append(line)
        return lines

    def _inlined(self, call: Node, top: bool) -> list[Statement]:
        """The wrapped rule's lines for one call, ending in its direction, its parameter, or both."""
        lines: list[Statement] = []
        values: dict[str, Node] = {}
        for argument, value in zip(("g", "t"), call.args, strict=True):
            if value.args:
                lines.append(Assign(f"{self.key}.{argument}", value))
                value = name(f"{self.key}.{argument}")
            values[argument] = value
        if call.args[0] is not name("g"):
            # The wrapper's input to the call is the wrapped rule's raw gradient too.
            values["grad"] = values["g"]
        self._keep_skip(values, top)
        body = self.inner.step
        parameter = f"{self.key}.p"
        if self.original.assigns_parameter:
            lines.append(Assign(parameter, name("p")))
            values["p"] = name(parameter)
            body = compose.map_targets(body, {"p": parameter})
        lines += compose.map_nodes(body, lambda value: compose.replace_names(value, values))
        if f"{self.wraps}.p" in self.reads and not self.original.assigns_parameter:
            step = node(Op.MUL, name("lr"), name(f"{self.key}.direction"))
            lines.append(Assign(parameter, node(Op.SUB, name("p"), step)))
        return lines

    def _keep_skip(self, values: dict[str, Node], top: bool) -> None:
        """Makes the wrapped rule's skip a skip of the whole step."""
        skip = self.inner.skip
        if skip is None:
            return
        if not top:
            raise RuleError(
                f"{self.original.name} skips steps, and {self.title} calls it only at some: put what skips before it, "
                f"with >>"
            )
        self.inner = replace(self.inner, skip=compose.replace_names(skip, values))


class _Shape:
    """The rows and columns of a wrapper's call, in place of the parameter's."""

    def __init__(self, wrapper: Rule, extents: Sequence[Node]) -> None:
        self.wrapper = wrapper
        self.rows, self.cols = extents
        rows, cols = name("rows"), name("cols")
        matrices = node(Op.DIV, name("numel"), node(Op.MUL, rows, cols))
        self.facts = {
            "rows": self.rows, "cols": self.cols,
            "numel": node(Op.MUL, matrices, node(Op.MUL, self.rows, self.cols)),
        }  # fmt: skip

    def fitted(self, inner: Rule, title: str) -> Rule:
        """The wrapped rule with states and shape facts of this shape; RuleError at a line that reads the parameter."""
        for line in assignments(inner.step):
            self._check(title, [line.value], line.span)
            if line.target == "p":
                self._refuse(title, "assigns p", line.span)
        for branch in conditions(inner.step):
            self._check(title, [branch.condition], branch.span)
        for key, kind in inner.inputs.items():
            if kind != "scalar":
                self._refuse(title, f"reads the input {key}", None)
        state = {key: self._state(title, key, state) for key, state in inner.state.items()}
        step = compose.map_nodes(inner.step, lambda value: compose.replace_names(value, self.facts))
        return replace(inner, state=state, step=step)

    def _check(self, title: str, values: Sequence[Node], span: Span | None) -> None:
        if "p" in names_in(values):
            self._refuse(title, "reads p", span)

    def _refuse(self, title: str, does: str, span: Span | None) -> NoReturn:
        raise rule_error(
            f"{title} {does}, which has the parameter's shape, and {self.wrapper.name} runs it in another: "
            f"put this part outside, as in {self.wrapper.called}(adam) + decay", span,
        )  # fmt: skip

    def _state(self, title: str, key: str, state: State) -> State:
        self._check(title, [state.init], state.span)
        change = self.facts
        moved = replace(
            state,
            init=compose.replace_names(state.init, change),
            condition=None if state.condition is None else compose.replace_names(state.condition, change),
        )
        if state.shape is not None:
            return replace(moved, shape=tuple(compose.replace_names(x, change) for x in state.shape))
        if state.per in ("row", "col"):
            self._refuse(title, f"keeps a state per {state.per}", state.span)
        return replace(moved, shape=(self.rows, self.cols)) if state.per == "element" else moved
