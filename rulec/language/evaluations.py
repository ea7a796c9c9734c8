"""Passes: points at which the model is evaluated again within one step, each with a gradient of its own.

Nothing below the language knows of passes. A rule with passes is lowered to ordinary rules. The rule of a
pass moves `p` to the point. The rule of the end takes the step, by the gradient at the last point. Earlier gradients
are inputs. Whoever runs the rules puts `p` back before each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from rulec.errors import RuleError
from rulec.language.expr.node import Kind, Node, Op, name, names_in, node, rewrite, walk
from rulec.language.hyper import Hyper
from rulec.language.inputs import InputKind
from rulec.language.rule_data import AnyRule, Assign, Branch, Move, RuleData, Statement
from rulec.language.source import Span, rule_error

#: Most passes of a step.
MAX_PASSES = 8

#: What the gradient at the parameter itself is called where a later pass reads it, as if it were a pass of this name.
START = "start"


def gradient_of(key: str) -> str:
    """The name of the gradient at a pass."""
    return f"{key}.g"


def standalone(rule: AnyRule) -> AnyRule:
    """The rule as it runs by itself: its step assigns `p`, and its learning rate has a default.

    Of a rule with passes it is the end of a step, after `moves`. RuleError for a hyper-parameter without a default, and
    for a wrapper around no rule.
    """
    return lowered(rule.assigning())


def in_one(rule: AnyRule) -> AnyRule:
    """The rule as `standalone` has it, but with its passes as lines, and the gradients there as inputs."""
    return unrolled(rule.assigning())


def settings_of(rule: RuleData) -> Mapping[str, Hyper]:
    """The hyper-parameters of an optimizer of the rule: `all_hyper` of the rule as it runs by itself."""
    return standalone(rule).all_hyper


def lowered(rule: AnyRule) -> AnyRule:
    """The end of a step of a rule whose step is whole: an ordinary rule, with a `Move` for each pass under `moves`."""
    if not rule.passes:
        return rule
    points = [START, *rule.passes]
    moves = []
    for place, (key, at) in enumerate(rule.passes.items()):
        line: Statement = Assign("p", at.point, at.span)
        step = (line,) if at.when is None else (Branch(at.when, (line,), (), at.span),)
        title = f"{rule.name}{key[:1].upper()}{key[1:]}"
        moves.append(Move(_seen_from(rule, title, step, place), at.when, gradient_of(points[place])))
    end = _seen_from(rule, rule.name, rule.step, len(rule.passes))
    skip, values = rule.skip, _values(rule, len(rule.passes))
    statistics = {key: replace(s, value=_replaced(s.value, values)) for key, s in rule.statistics.items()}
    return replace(
        rule, step=end.step, inputs=end.inputs, passes={}, moves=tuple(moves), statistics=statistics,
        skip=None if skip is None else _replaced(skip, values),
    )  # fmt: skip


def unrolled(rule: AnyRule) -> AnyRule:
    """A whole step as one ordinary rule, with the gradients at the passes as inputs and the points as lines.

    It shows what a step computes. Nothing evaluates the model at its points.
    """
    lines: list[Statement] = []
    inputs, last = dict(rule.inputs), "g"
    for key, at in rule.passes.items():
        there, here = f"{key}.gradient", gradient_of(key)
        taken = (Assign(f"{key}.p", at.point, at.span), Assign(here, name(there), at.span))
        if at.when is None:
            lines.extend(taken)
        else:
            lines.append(Branch(at.when, taken, (Assign(here, name(last), at.span),), at.span))
        inputs[there], last = "like p", here
    return replace(rule, step=(*lines, *rule.step), inputs=inputs, passes={})


def _seen_from(rule: AnyRule, title: str, step: Sequence[Statement], place: int) -> AnyRule:
    """The lines `step` of a rule after `place` passes, where `g` is the last gradient and the others are inputs."""
    values = _values(rule, place)
    lines, inputs = _gradients(rule, place, _names_in(step, rule.skip if place == len(rule.passes) else None))
    changed = tuple(_mapped(line, values) for line in step)
    return type(rule)(title, (*lines, *changed), rule.hyper, rule.state, {**rule.inputs, **inputs}, view=rule.view)


def _values(rule: RuleData, place: int) -> dict[str, Node]:
    """What stands for each gradient after `place` passes."""
    values = {}
    for i, key in enumerate([START, *rule.passes][: place + 1]):
        values[gradient_of(key)] = name("g") if i == place else name(_local(rule, key, place))
    first = values[gradient_of(START)]
    return {**values, "g": first, "grad": first}


def _local(rule: RuleData, key: str, place: int) -> str:
    """The name of an earlier gradient: that of its input, or where a step may have no later pass one of its own."""
    return f"{key}.gradient" if _later(rule, key, place) else gradient_of(key)


def _later(rule: RuleData, key: str, place: int) -> list[Node]:
    """The conditions of the passes after this point; none where one of them is in every step."""
    points = [START, *rule.passes]
    conditions = [rule.passes[later].when for later in points[points.index(key) + 1 : place + 1]]
    return [] if None in conditions else [condition for condition in conditions if condition is not None]


def _gradients(rule: RuleData, place: int, read: set[str]) -> tuple[list[Statement], dict[str, InputKind]]:
    """The lines that give earlier gradients their names where a pass may be left out, and the inputs they are."""
    lines: list[Statement] = []
    inputs: dict[str, InputKind] = {}
    for i, key in enumerate([START, *rule.passes][:place]):
        if not read & ({"g", "grad"} if i == 0 else {gradient_of(key)}):
            continue
        inputs[gradient_of(key)] = "like p"
        if conditions := _later(rule, key, place):
            condition = conditions[0]
            for other in conditions[1:]:
                condition = node(Op.OR, condition, other)
            target = _local(rule, key, place)
            kept, last = Assign(target, name(gradient_of(key))), Assign(target, name("g"))
            lines.append(Branch(condition, (kept,), (last,)))
    return lines, inputs


def _names_in(step: Iterable[Statement], skip: Node | None) -> set[str]:
    read = set() if skip is None else set(names_in([skip]))
    for line in step:
        if isinstance(line, Assign):
            read.update(names_in([line.value]))
        else:
            read.update(names_in([line.condition]), _names_in((*line.then, *line.otherwise), None))
    return read


def _replaced(value: Node, values: Mapping[str, Node]) -> Node:
    return rewrite([value], lambda n: values.get(str(n.arg), n) if n.op is Op.NAME else n)[0]


def _mapped(line: Statement, values: Mapping[str, Node]) -> Statement:
    if isinstance(line, Assign):
        return replace(line, value=_replaced(line.value, values))
    then, otherwise = ([_mapped(x, values) for x in arm] for arm in (line.then, line.otherwise))
    return replace(line, condition=_replaced(line.condition, values), then=tuple(then), otherwise=tuple(otherwise))


def check_passes(rule: RuleData) -> None:
    """RuleError for too many passes, and for a pass whose gradient nothing reads."""
    for count, (key, at) in enumerate(rule.passes.items()):
        if count >= MAX_PASSES:
            raise rule_error(f"{rule.name} has {len(rule.passes)} passes, over the limit of {MAX_PASSES}", at.span)
        later = [each.point for other, each in rule.passes.items() if other != key]
        if not rule.reads(gradient_of(key)) and gradient_of(key) not in names_in(later):
            raise rule_error(
                f"the gradient {gradient_of(key)} is never read: read it in the step, or remove the pass", at.span
            )


def check_point(value: Node, span: Span | None) -> Node:
    """The same expression of a point; RuleError for random numbers, which are numbered in the step alone."""
    if any(part.op.kind is Kind.RANDOM for part in walk([value])):
        raise rule_error("random numbers cannot be part of a point: draw them in the step", span)
    return value


def parts_of(rule: AnyRule) -> list[AnyRule]:
    """The ordinary rules that one with passes, or with such a rule for other tensors, is lowered to; else itself."""
    parts: list[AnyRule] = []
    passes = 0
    each: AnyRule | None = rule
    while each is not None:
        end = standalone(each)
        parts += [*(cast(AnyRule, move.rule) for move in end.moves), replace(end, moves=(), otherwise=None)]
        passes, each = passes + len(end.moves), each.rest
    return parts if passes else [rule]


def evaluations(rule: RuleData) -> int:
    """The number of gradients of a step, at most: 1 for a rule without passes. `rule` may be lowered or not."""
    return 1 + max(len(rule.passes), len(rule.moves))


def check_single(rule: RuleData, where: str) -> None:
    """RuleError for a rule with passes: `where` is what cannot run it, the beginning of a sentence."""
    each: RuleData | None = rule
    while each is not None:
        if evaluations(each) > 1:
            raise RuleError(
                f"{where} has one gradient in a step, and {each.name} evaluates the model {evaluations(each)} times: "
                f"use rulec.torch.optimizer, rulec.jax.step or rulec.array.Optimizer"
            )
        each = each.rest
