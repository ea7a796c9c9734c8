"""Wrappers: rules with calls of other rules in their step, as in `lookahead(adamw)` and `graft(shampoo, adam)`.

A rule with some of its lines changed is made here too, for a library with its own form of these lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from rulec.errors import RuleError
from rulec.language.check import check_rule
from rulec.language.compose import combine
from rulec.language.compose.bind import bind
from rulec.language.compose.cases import composed, unify_inputs
from rulec.language.compose.combine import map_nodes, substitute_hyper
from rulec.language.evaluations import gradient_of
from rulec.language.expr import functions
from rulec.language.expr.counts import level_text
from rulec.language.expr.functions import FUNCTIONS
from rulec.language.expr.names import BASE_NAMES, RESERVED
from rulec.language.expr.node import PLACED, Node, Op, const, name, names_in, node, rewrite, walk
from rulec.language.expr.static import inside
from rulec.language.hyper import DEFAULT_LR, Hyper, well_known_range
from rulec.language.inputs import LIKE_P, changed_extents
from rulec.language.parse.expression import parse_expression
from rulec.language.parse.located import Text
from rulec.language.rule_data import (
    RATE,
    AnyRule,
    Assign,
    Branch,
    RuleData,
    State,
    Statement,
    Statistic,
    assignments,
    conditions,
)
from rulec.language.sizes import with_sizes
from rulec.language.source import Source, Span, rule_error


def wrap(wrapper: AnyRule, *wrapped: AnyRule) -> AnyRule:
    """The rule `wrapper(wrapped)`: the wrapper's lines, with the lines of the wrapped rules in place of its calls.

    Hyper-parameters and states of all are joined as in any composition. Raises RuleError where they do not fit.
    """
    names = wrapper.wraps
    if not names:
        raise RuleError(f"{wrapper.name} wraps no rule: did you mean {wrapper.called} >> {wrapped[0].called}?")
    if len(wrapped) != len(names):
        count = "one rule" if len(names) == 1 else f"{len(names)} rules, {' and '.join(names)}"
        raise RuleError(f"{wrapper.name} wraps {count}, not {len(wrapped)}: write {wrapper.example}")
    for rule in wrapped:
        rule.check_whole()

    def join(parts: Sequence[AnyRule]) -> AnyRule:
        first, *rules = parts
        if not first.step:
            return rules[names.index(first.wraps[0])]
        return _wrapped(first, rules) if first.wraps else first

    rules = [wrapper, *_apart(wrapper, wrapped)]
    return with_sizes(composed(rules, join), rules, lambda parts: wrap(*parts))


def _apart(wrapper: AnyRule, rules: Sequence[AnyRule]) -> list[AnyRule]:
    """The rules with equal defaults for hyper-parameters of the same name: those of the last one.

    The learning rate is that of the last rule, for the wrapper multiplies it by directions. Another hyper-parameter of
    a rule before it is renamed, as `shampoo_eps`.
    """
    done = [rules[-1]]
    for rule, call in zip(rules[-2::-1], wrapper.wraps[-2::-1], strict=True):
        taken = {key: hyper for other in done for key, hyper in _settings(other).items()}
        mine = _settings(rule)
        bindings: dict[str, float | str] = {}
        for key, hyper in mine.items():
            theirs = taken[key].default if key in taken else hyper.default
            if theirs == hyper.default or None in (theirs, hyper.default):
                continue
            if key == "lr" and isinstance(theirs, float) and not wrapper.reads(f"{call}.p"):
                bindings[key] = theirs
            elif key != "lr" and (new := f"{rule.key}_{key}") not in {*taken, *mine, *wrapper.hyper}:
                bindings[key] = new
        done.insert(0, bind(rule, bindings) if bindings else rule)
    return done


def _settings(rule: RuleData) -> Mapping[str, Hyper]:
    return rule.hyper_with_rate | rule.all_hyper


def _wrapped(wrapper: AnyRule, rules: Sequence[AnyRule]) -> AnyRule:
    """The wrapper around rules without routing."""
    rate = combine.common_rate(rules)
    if rate is not RATE and "lr" in wrapper.hyper:
        hyper = {key: hyper for key, hyper in wrapper.hyper.items() if key != "lr"}
        wrapper = replace(combine.substitute_hyper(wrapper, {"lr": rate}), hyper=hyper)
    called = _Called(wrapper, rules)
    inner = [each.rule for each in called.inner]
    owners = [(rule.name, each.hyper) for rule, each in zip(rules, called.inner, strict=True)]
    joined = type(wrapper)(
        name=combine.joined_name("", [wrapper, *rules]),
        step=tuple(called.lines()),
        hyper=combine.unify_hyper([*owners, (wrapper.name, wrapper.hyper)]),
        state={key: state for rule in (*inner, called.wrapper) for key, state in rule.state.items()},
        inputs=unify_inputs([*inner, called.wrapper]),
        rate=RATE if wrapper.assigns_parameter else rate,
        statistics={**called.wrapper.statistics, **called.statistics()},
        **combine.single_attributes([called.wrapper, *(each.rule for each in called.inner)]),
    )
    kept = {f"{each.key}.{n}" for each in called.inner for n in ("g", "t", "p", "point")}
    taken = {*joined.hyper, *joined.inputs, *RESERVED, *kept, *map(gradient_of, joined.passes)}
    owned = [*rules, wrapper], [*called.keys[1:], called.keys[0]]
    return check_rule(combine.rename_all(joined, combine.short_names(*owned, taken)))


class _Called:
    """A wrapper and the rules it wraps, their names kept apart by prefixes."""

    def __init__(self, wrapper: RuleData, rules: Sequence[RuleData]) -> None:
        self.keys = combine.keys_of([wrapper, *rules])
        # An lr in the direction was bound on purpose: behind a prefix it is not taken for a mistake.
        self.bound = not wrapper.assigns_parameter and wrapper.reads("lr")
        kept = () if self.bound else ("direction",)
        renames = {n: f"{self.keys[0]}.{n}" for n in combine.own_names(wrapper) if n not in kept}
        calls = [*zip(wrapper.wraps, self.keys[1:], strict=True)]
        renames |= {f"{call}.{n}": f"{key}.{n}" for call, key in calls for n in ("p", "direction")}
        self.wrapper = combine.rename_all(wrapper, renames)
        self.inner: list[_Inner] = []
        draws = combine.count_draws(wrapper)
        for (call, key), rule in zip(calls, rules, strict=True):
            self.inner.append(_Inner(wrapper, call, key, rule, draws))
            draws += combine.count_draws(rule)

    def lines(self) -> list[Statement]:
        """The wrapper's lines, with the wrapped rules' lines in place of their calls."""
        lines = self._lines(self.wrapper.step, top=True)
        return [*lines, Assign("direction", name(f"{self.keys[0]}.direction"))] if self.bound else lines

    def statistics(self) -> dict[str, Statistic]:
        """The statistics of the wrapped rules, each named by its rule's key. Call `lines` before."""
        return {key: each for inner in self.inner for key, each in inner.statistics.items()}

    def _lines(self, step: Sequence[Statement], top: bool) -> list[Statement]:
        lines: list[Statement] = []
        for line in step:
            if isinstance(line, Branch):
                then, otherwise = self._lines(line.then, False), self._lines(line.otherwise, False)
                lines.append(replace(line, then=tuple(then), otherwise=tuple(otherwise)))
            elif line.value.op is Op.CALL:
                inner = next(inner for inner in self.inner if inner.call == line.value.arg)
                lines.extend(inner.lines(line.value, top))
            else:
                lines.append(line)
        return lines


class _Inner:
    """A rule that is wrapped, under the wrapper's name for it and with a prefix of its own."""

    def __init__(self, wrapper: RuleData, call: str, key: str, rule: RuleData, draws: int) -> None:
        self.title, self.call, self.key, self.original = wrapper.name, call, key, rule
        self.reads_parameter = wrapper.reads(f"{call}.p")
        if wrapper.reads(f"{call}.direction") and rule.assigns_parameter:
            line = next(line for line in assignments(rule.step) if line.target == "p")
            raise rule_error(
                f"{rule.name} assigns p itself, and {wrapper.name} needs the direction of the rule it wraps", line.span
            )
        self.rule = combine.prefixed(combine.shifted_draws(rule, draws), key)
        if wrapper.wraps_shape is not None:
            self.rule = _Shape(wrapper, wrapper.wraps_shape).fitted(self.rule, rule.name)
        #: The statistics, by the names of the whole rule, once its lines are known.
        self.statistics: dict[str, Statistic] = {}
        self.hyper = dict(rule.hyper)
        if self.reads_parameter and rule.multiplies_lr:
            self.hyper.setdefault("lr", Hyper(DEFAULT_LR, **well_known_range("lr")))

    def lines(self, call: Node, top: bool) -> list[Statement]:
        """The rule's lines for one call, ending in its direction, its parameter, or both."""
        lines: list[Statement] = []
        values: dict[str, Node] = {}
        for argument, key, value in zip(("g", "t", "p"), ("g", "t", "point"), call.args, strict=True):
            if value.args:
                lines.append(Assign(f"{self.key}.{key}", value))
                value = name(f"{self.key}.{key}")
            values[argument] = value
        point = values["p"]
        if call.args[0] is not name("g"):
            # The wrapper's input to the call is the wrapped rule's raw gradient too.
            values["grad"] = values["g"]
        self._keep_skip(values, top)
        self._check_passes(values, top)
        body = self.rule.step
        parameter = f"{self.key}.p"
        if self.original.assigns_parameter:
            lines.append(Assign(parameter, point))
            values["p"] = name(parameter)
            body = combine.map_targets(body, {"p": parameter})
        lines += combine.map_nodes(body, lambda value: combine.replace_names(value, values))
        measured = {argument: value for argument, value in values.items() if argument != "p"}
        self.statistics = combine.map_statistics(
            self.rule.statistics, lambda value: combine.replace_names(value, measured), self.key
        )
        if self.reads_parameter and not self.original.assigns_parameter:
            step = node(Op.MUL, self.original.rate, name(f"{self.key}.direction"))
            lines.append(Assign(parameter, node(Op.SUB, point, step)))
        return lines

    def _keep_skip(self, values: dict[str, Node], top: bool) -> None:
        """Makes the wrapped rule's skip a skip of the whole step."""
        skip = self.rule.skip
        if skip is None:
            return
        if not top:
            raise RuleError(
                f"{self.original.name} skips steps, and {self.title} calls it only at some: put what skips before it, "
                f"with >>"
            )
        self.rule = replace(self.rule, skip=combine.replace_names(skip, values))

    def _check_passes(self, values: dict[str, Node], top: bool) -> None:
        """RuleError where the wrapped rule has passes, and its call is not the whole step: the model is evaluated once
        a step for all of it."""
        if self.rule.passes and not (top and all(value is name(key) for key, value in values.items())):
            raise RuleError(
                f"{self.original.name} evaluates the model again in a step, and {self.title} calls it at some steps, "
                f"or with values of its own: put {self.title} inside of it"
            )


class _Shape:
    """The rows and columns of a wrapper's call, in place of the parameter's."""

    def __init__(self, wrapper: RuleData, extents: Sequence[Node]) -> None:
        self.wrapper = wrapper
        self.rows, self.cols = extents
        rows, cols = name("rows"), name("cols")
        matrices = node(Op.DIV, name("numel"), node(Op.MUL, rows, cols))
        self.facts = {
            "rows": self.rows, "cols": self.cols,
            "numel": node(Op.MUL, matrices, node(Op.MUL, self.rows, self.cols)),
        }  # fmt: skip

    def fitted(self, inner: AnyRule, title: str) -> AnyRule:
        """The wrapped rule with states and shape facts of this shape; RuleError at a line that reads the parameter."""
        for line in assignments(inner.step):
            self._check(title, [line.value], line.span)
            if line.target == "p":
                self._refuse(title, "assigns p", line.span)
        for branch in conditions(inner.step):
            self._check(title, [branch.condition], branch.span)
        for each in inner.passes.values():
            self._refuse(title, "evaluates the model again", each.span)
        for key, kind in inner.inputs.items():
            if kind == LIKE_P:
                self._refuse(title, f"reads the input {key}", None)
        state = {key: self._state(title, key, state) for key, state in inner.state.items()}
        step = combine.map_nodes(inner.step, lambda value: combine.replace_names(value, self.facts))
        inputs = changed_extents(inner.inputs, lambda value: combine.replace_names(value, self.facts))
        return replace(inner, state=state, inputs=inputs, step=step)

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
            init=combine.replace_names(state.init, change),
            condition=None if state.condition is None else combine.replace_names(state.condition, change),
        )
        if state.shape is not None:
            return replace(moved, shape=tuple(combine.replace_names(x, change) for x in state.shape))
        if state.per in ("row", "col", *PLACED):
            self._refuse(title, f"keeps a state per {level_text(state.per, state.number)}", state.span)
        return replace(moved, shape=(self.rows, self.cols)) if state.per == "element" else moved


def variant(
    rule: AnyRule, lines: Mapping[str, str], start: Mapping[str, object], more: Mapping[str, float | str]
) -> AnyRule:
    """The rule with new lines and new initial values of states.

    `lines` maps a target to its new expression, `start` a state to its new initial value. A line for `p` replaces the
    line for `direction` in a rule with one. `more` has defaults of further hyper-parameters, numbers or names; the rule
    gets those in the new expressions. Raises RuleError for a target without a line.
    """
    assigned = [line.target for line in assignments(rule.step)]
    known = {*BASE_NAMES, *rule.hyper, *rule.state, *rule.inputs, *assigned, *more}
    values = {target: _parsed(text, known) for target, text in lines.items()}
    starts = {key: _parsed(str(text), known) for key, text in start.items()}
    for target in values.keys() - {*assigned, "p"}:
        raise RuleError(f"{rule.name} has no line that assigns {target}")
    read = names_in([*values.values(), *starts.values()])
    added = {k: v for k, v in more.items() if k in read and k not in rule.hyper}
    hyper = {**rule.hyper, **{k: Hyper(name(v) if isinstance(v, str) else v) for k, v in added.items()}}
    state = {k: replace(s, init=starts[k]) if k in starts else s for k, s in rule.state.items()}
    moves = "p" if "p" in values and "p" not in assigned else ""
    step = tuple(_changed(line, values, moves) for line in rule.step)
    return check_rule(replace(rule, step=step, hyper=hyper, state=state, interop={}, path=None, function=None))


def in_form(rule: AnyRule, form: str) -> AnyRule:
    """The rule with every `newton_schulz` in a form; RuleError for another word, and for a rule without any."""
    function = FUNCTIONS["newton_schulz"]
    if form not in function.choices["form"]:
        raise RuleError(f"form of newton_schulz is one of {function.allowed('form')}, not {form!r}")
    if not iterates(rule):
        raise RuleError(f"{rule.name} has no newton_schulz, which alone has forms")
    step = map_nodes(rule.step, lambda value: rewrite([value], lambda part: functions.in_form(part, form))[0])
    return check_rule(replace(rule, step=step, interop={}, path=None, function=None))


def iterates(rule: RuleData) -> bool:
    """Whether the step of a rule has a `newton_schulz`."""
    return any(inside(part).op is Op.NEWTON_SCHULZ for part in walk(line.value for line in assignments(rule.step)))


def _parsed(text: str, known: Iterable[str]) -> Node:
    return parse_expression(Text(text, Source("an interop section", text)), known)


def _changed(line: Statement, values: Mapping[str, Node], moves: str) -> Statement:
    if not isinstance(line, Assign):
        then, otherwise = (tuple(_changed(each, values, moves) for each in arm) for arm in (line.then, line.otherwise))
        return replace(line, then=then, otherwise=otherwise)
    target = "p" if moves and line.target == "direction" else line.target
    return Assign(target, values[target], line.span) if target in values else line


def without(changed: AnyRule, zeros: Iterable[str], rule: AnyRule) -> AnyRule:
    """`rule` where `changed`, with the hyper-parameters `zeros` at 0, computes the same; otherwise `changed`."""
    values = {name: const(0.0) for name in zeros if name in changed.hyper and name not in rule.hyper}
    bare = substitute_hyper(changed, values)
    known = {"t", *bare.hyper}
    step = map_nodes(bare.step, lambda value: rewrite([value], lambda part: _added_nothing(part, known))[0])
    return rule if values.keys() | rule.hyper.keys() == changed.hyper.keys() and _same(step, bare, rule) else changed


def _same(step: tuple[Statement, ...], bare: RuleData, rule: RuleData) -> bool:
    return step == rule.step and bare.state == rule.state


def _added_nothing(value: Node, scalars: set[str]) -> Node:
    """`x` for `x + 0`, and 0 for `0*a` where `a` is an expression of `scalars` alone: these are finite."""
    zero = const(0.0)
    if value.op is Op.MUL and value.args[0] is zero and scalars >= {*names_in([value.args[1]])}:
        return zero
    return value.args[0] if value.op is Op.ADD and value.args[1] is zero else value
