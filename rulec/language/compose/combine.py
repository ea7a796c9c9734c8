"""Composition: rules made of rules, and initial values that an elementwise expression cannot give.

Every composition ends in `inline`: the lines of a rule with its input replaced and its names kept apart. The result is
an ordinary rule, and compiles to one program like any other.

Initial values of matrices, reductions and random numbers are no elementwise expressions. Such a state is 0 at first,
and the step begins with a line that assigns it where `t` is 1. So every backend has them. A rule that counts
another rule's updates, as `accumulate` does, initialises the state in that rule's first update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

from rulec.errors import RuleError
from rulec.language.check import MAX_TITLE, check_rule
from rulec.language.compose.cases import composed, unify_inputs
from rulec.language.evaluations import gradient_of
from rulec.language.expr.names import CONSTANTS, RESERVED
from rulec.language.expr.node import FACTS, Kind, Node, Op, const, name, names_in, node, rewrite, walk
from rulec.language.expr.text import expression_text
from rulec.language.hyper import Hyper
from rulec.language.inputs import changed_extents
from rulec.language.rule_data import (
    RATE,
    AnyRule,
    Assign,
    Branch,
    Pass,
    RuleData,
    State,
    Statement,
    Statistic,
    assignments,
)
from rulec.language.sizes import with_sizes

#: Attributes of a rule as a whole: of several composed rules at most one may have each.
_WHOLE = ("evaluate", "skip", "view", "passes")


def map_nodes(step: Sequence[Statement], change: Callable[[Node], Node]) -> tuple[Statement, ...]:
    """The statements with every expression passed through `change`."""
    done: list[Statement] = []
    for line in step:
        if isinstance(line, Assign):
            done.append(replace(line, value=change(line.value)))
        else:
            then, otherwise = map_nodes(line.then, change), map_nodes(line.otherwise, change)
            done.append(replace(line, condition=change(line.condition), then=then, otherwise=otherwise))
    return tuple(done)


def map_targets(step: Sequence[Statement], rename: Mapping[str, str]) -> tuple[Statement, ...]:
    """The statements with their targets renamed."""
    done: list[Statement] = []
    for line in step:
        if isinstance(line, Assign):
            done.append(replace(line, target=rename.get(line.target, line.target)))
        else:
            then, otherwise = map_targets(line.then, rename), map_targets(line.otherwise, rename)
            done.append(Branch(line.condition, then, otherwise, line.span))
    return tuple(done)


def replace_names(value: Node, values: Mapping[str, Node]) -> Node:
    """`value` with each name in `values` replaced, all at once."""
    return rewrite([value], lambda n: values.get(str(n.arg), n) if n.op is Op.NAME else n)[0]


def rename_all(rule: AnyRule, rename: Mapping[str, str]) -> AnyRule:
    """The rule with states and locals renamed everywhere."""
    values = {old: name(new) for old, new in rename.items()}
    step = map_targets(map_nodes(rule.step, lambda n: replace_names(n, values)), rename)
    state = {rename.get(k, k): v for k, v in rule.state.items()}
    evaluate, skip = (None if x is None else replace_names(x, values) for x in (rule.evaluate, rule.skip))
    passes = map_passes(rule.passes, lambda n: replace_names(n, values))
    statistics = map_statistics(rule.statistics, lambda n: replace_names(n, values))
    return replace(rule, step=step, state=state, evaluate=evaluate, skip=skip, passes=passes, statistics=statistics)


def map_passes(passes: Mapping[str, Pass], change: Callable[[Node], Node]) -> dict[str, Pass]:
    """The passes with every expression passed through `change`."""
    return {
        key: replace(each, point=change(each.point), when=None if each.when is None else change(each.when))
        for key, each in passes.items()
    }


def map_statistics(
    statistics: Mapping[str, Statistic], change: Callable[[Node], Node], prefix: str = ""
) -> dict[str, Statistic]:  # fmt: skip
    """The statistics with every expression passed through `change`, named `prefix.…` where there is a prefix."""
    start = f"{prefix}." if prefix else ""
    return {f"{start}{key}": replace(each, value=change(each.value)) for key, each in statistics.items()}


def own_names(rule: RuleData) -> list[str]:
    """The states and locals of a rule. Compositions keep these names apart."""
    assigned = (a.target for a in assignments(rule.step) if a.target != "p" and a.value.op is not Op.CALL)
    return list(dict.fromkeys([*rule.state, *assigned]))


def prefixed(rule: AnyRule, prefix: str) -> AnyRule:
    """The rule with its states and locals named `prefix.…`."""
    return rename_all(rule, {n: f"{prefix}.{n}" for n in own_names(rule)})


def _require_direction(rule: RuleData, role: str) -> None:
    rule.check_whole()
    if rule.assigns_parameter:
        raise RuleError(f"{rule.name} assigns p itself, so it cannot be {role}: use it alone or last in a chain")


def inline(rule: RuleData, prefix: str, value: Node, draws: int = 0) -> list[Statement]:
    """The lines of `rule` for the input `value`, its states and locals named `prefix.…`; ends in `prefix.direction`.

    Its random draws are numbered from `draws` on.
    """
    return _with_input(prefixed(shifted_draws(check_callable(rule), draws), prefix), prefix, value)


def statistics_inside(rule: RuleData, prefix: str, value: Node) -> dict[str, Statistic]:
    """The statistics of a rule that `inline` puts into the lines of another, named `prefix.…`."""
    return map_statistics(prefixed(rule, prefix).statistics, partial(replace_names, values={"g": value}), prefix)


def count_draws(rule: RuleData) -> int:
    """How many numbers the random draws of a rule take: one more than the highest."""
    numbers = [cast(int, n.arg) for n in walk(rule.expressions) if n.op.kind is Kind.RANDOM]
    return max(numbers, default=-1) + 1


def shifted_draws(rule: AnyRule, by: int) -> AnyRule:
    """The rule with its random draws numbered from `by` on: independent of the draws with lower numbers."""
    if not by or not count_draws(rule):
        return rule
    skip = None if rule.skip is None else drawn_from(rule.skip, by)
    return replace(rule, step=map_nodes(rule.step, lambda value: drawn_from(value, by)), skip=skip)


def drawn_from(value: Node, by: int) -> Node:
    """An expression with its random draws numbered from `by` on."""

    def change(n: Node) -> Node:
        return node(n.op, *n.args, cast(int, n.arg) + by) if n.op.kind is Kind.RANDOM else n

    return rewrite([value], change)[0]


def check_callable(rule: AnyRule) -> AnyRule:
    """The same rule, checked to be callable in the step of another; RuleError otherwise."""
    _require_direction(rule, "called")
    for attribute in ("evaluate", "skip", "passes"):
        if getattr(rule, attribute) not in (None, {}):
            raise RuleError(f"{rule.name} says {attribute}, so it cannot be called: say it in the rule that calls it")
    return rule


def _with_input(rule: RuleData, prefix: str, value: Node) -> list[Statement]:
    lines: list[Statement] = []
    if value.args:
        lines.append(Assign(f"{prefix}.g", value))
        value = name(f"{prefix}.g")
    return [*lines, *map_nodes(rule.step, lambda n: replace_names(n, {"g": value}))]


def called_states(rule: RuleData, prefix: str) -> dict[str, State]:
    """The states of a rule called inside another, under their names in its inlined lines."""
    return {f"{prefix}.{key}": state for key, state in rule.state.items()}


def unify_hyper(owners: Sequence[tuple[str, Mapping[str, Hyper]]]) -> dict[str, Hyper]:
    """The hyper-parameters of several rules as one set. Same-named ones are one, and their defaults must agree."""
    merged: dict[str, Hyper] = {}
    first: dict[str, str] = {}
    for owner, hyper in owners:
        for key, mine in hyper.items():
            other = merged.get(key)
            if other is None:
                merged[key], first[key] = mine, owner
            elif None in (mine.default, other.default) or mine.default == other.default:
                merged[key] = _tighter(other, mine)
            else:
                raise RuleError(
                    f"{first[key]} and {owner} both have a hyper-parameter {key!r}, with the defaults "
                    f"{_plain(other)} and {_plain(mine)}: bind one of them to a number or to another name"
                )
    return merged


def _plain(hyper: Hyper) -> str:
    return repr(hyper.default).strip("<>")


def _tighter(a: Hyper, b: Hyper) -> Hyper:
    return Hyper(
        default=b.default if a.default is None else a.default,
        min=max(a.min, b.min), max=min(a.max, b.max), above=max(a.above, b.above), below=min(a.below, b.below),
        static=a.static or b.static, whole=a.whole or b.whole, decides=a.decides or b.decides,
        follows=a.follows or b.follows, span=a.span or b.span,
    )  # fmt: skip


def common_rate(rules: Sequence[RuleData]) -> Node:
    """The learning rate of composed rules. A part without a declared or bound `lr` takes the `lr` of the others.

    RuleError where the rules have different ones.
    """
    having = [rule for rule in rules if not rule.assigns_parameter and (rule.rate is not RATE or "lr" in rule.hyper)]
    for rule in having[1:]:
        if rule.rate is not having[0].rate:
            first, second = (f"{r.name} has the learning rate {expression_text(r.rate)}" for r in (having[0], rule))
            raise RuleError(f"{first}, and {second}: bind lr of both to the same")
    return having[0].rate if having else RATE


def keys_of(rules: Sequence[RuleData]) -> list[str]:
    """A prefix for each rule: its key, numbered where several rules have the same key."""
    keys: dict[str, None] = {}
    for rule in rules:
        key, count = rule.key, 2
        while key in keys:
            key, count = f"{rule.key}{count}", count + 1
        keys[key] = None
    return list(keys)


def plus(rules: Sequence[AnyRule], rule_name: str | None = None) -> AnyRule:
    """The rules side by side: all see the same gradient, and their directions add.

    One of the rules may assign `p` itself: then `p` is what it assigns, less `lr` times the directions of the others.
    Raises RuleError where two rules assign `p`, or where their hyper-parameters, inputs or views disagree.
    """
    total = composed(rules, lambda parts: _sum(parts, joined_name("Plus", parts)), rule_name)
    return with_sizes(total, rules, lambda parts: plus(parts, rule_name))


def _sum(rules: Sequence[AnyRule], title: str) -> AnyRule:
    moving = [rule for rule in rules if rule.assigns_parameter]
    if moving:
        return _moved_sum(rules, moving, title)
    for rule in rules:
        _require_direction(rule, "added")
    keys = keys_of(rules)
    return _join(rules, keys, [name("g")] * len(rules), [Assign("direction", _directions(keys))], title)


def _directions(keys: Sequence[str]) -> Node:
    """The sum of the directions of rules."""
    total = name(f"{keys[0]}.direction")
    for key in keys[1:]:
        total = node(Op.ADD, total, name(f"{key}.direction"))
    return total


def _moved_sum(rules: Sequence[AnyRule], moving: Sequence[AnyRule], title: str) -> AnyRule:
    """The sum of rules of which one assigns `p`: its lines come first, for a parameter of their own name."""
    first, *others = moving
    if others:
        raise RuleError(f"{first.name} and {others[0].name} both assign p: only one of added rules may")
    rest = [rule for rule in rules if rule is not first]
    for rule in (first, *rest):
        rule.check_whole()
    if first.evaluate is not None or not first.reads("p"):
        why = "is evaluated at another point" if first.reads("p") else "never reads p, so its next step would forget it"
        raise RuleError(
            f"nothing can be added to the p of {first.name}, which {why}: add {rest[0].called} to a rule inside of it"
        )
    rate = common_rate(rest)
    if "lr" in names_in([rate]) and "lr" not in first.hyper and not any("lr" in rule.hyper for rule in rest):
        raise RuleError(
            f"{first.name} has no lr, which multiplies the direction of {rest[0].name}: write "
            f"{first.called} + {rest[0].called}(lr=0.01), or another number"
        )
    keys = keys_of([first, *rest])
    new = free_name("new_p", {*own_names(first), *first.hyper, *first.inputs})
    total = node(Op.MUL, rate, _directions(keys[1:]))
    last = Assign("p", node(Op.SUB, name(f"{keys[0]}.{new}"), total))
    return _join([_assigning(first, new), *rest], keys, [name("g")] * len(keys), [last], title)


def _assigning(rule: AnyRule, new: str) -> AnyRule:
    """The rule with `new` in the place of `p` in its lines: it begins with `p`, and `p` is left as it is."""
    step = map_targets(map_nodes(rule.step, lambda value: replace_names(value, {"p": name(new)})), {"p": new})
    return replace(rule, step=(Assign(new, name("p")), *step))


def chain(rules: Sequence[AnyRule], rule_name: str | None = None) -> AnyRule:
    """The rules one after the other: the direction of each is the input `g` of the next.

    Raises RuleError where a rule before the last assigns `p` itself, where a rule after the first never reads `g`, or
    where their hyper-parameters, inputs or views disagree.
    """
    whole = composed(rules, lambda parts: _sequence(parts, joined_name("Then", parts)), rule_name)
    return with_sizes(whole, rules, lambda parts: chain(parts, rule_name))


def _sequence(rules: Sequence[AnyRule], title: str) -> AnyRule:
    for rule in rules[:-1]:
        _require_direction(rule, "followed by another")
    rules[-1].check_whole()
    for before, rule in pairwise(rules):
        if rule.passes:
            raise RuleError(
                f"{rule.name} evaluates the model again in a step, and {before.name} before it would see one of its "
                f"gradients: put {before.called} inside of the wrapper with the passes"
            )
        if not rule.reads("g"):
            raise RuleError(
                f"{rule.name} never reads its input g, so {before.name} before it would have no effect: "
                f"did you mean {before.called} + {rule.called}?"
            )
    keys = keys_of(rules)
    inputs = [name("g"), *(name(f"{key}.direction") for key in keys[:-1])]
    last: list[Statement] = []
    if not rules[-1].assigns_parameter:
        last = [Assign("direction", name(f"{keys[-1]}.direction"))]
    return _join(rules, keys, inputs, last, title)


def joined_name(word: str, rules: Sequence[RuleData]) -> str:
    """The rules' names joined by a word, or a shorter text where these are too long for one name."""
    joined = word.join(rule.name for rule in rules)
    return joined if len(joined) <= MAX_TITLE else f"{rules[0].name[: MAX_TITLE // 2]}{word}{len(rules) - 1}More"


def _join(
    rules: Sequence[AnyRule], keys: Sequence[str], inputs: Sequence[Node], last: Sequence[Statement], rule_name: str
) -> AnyRule:
    """One rule of the prefixed lines of several and `last`; names without a clash lose their prefix."""
    parts, draws = [], 0
    for rule, key in zip(rules, keys, strict=True):
        parts.append(prefixed(shifted_draws(rule, draws), key))
        draws += count_draws(rule)
    step: list[Statement] = []
    statistics: dict[str, Statistic] = {}
    for index, (key, value) in enumerate(zip(keys, inputs, strict=True)):
        step.extend(_with_input(parts[index], key, value))
        skip = parts[index].skip
        if skip is not None:
            parts[index] = replace(parts[index], skip=replace_names(skip, {"g": value}))
        statistics |= map_statistics(parts[index].statistics, partial(replace_names, values={"g": value}), key)
    joined = type(rules[0])(
        name=rule_name,
        step=(*step, *last),
        hyper=unify_hyper([(rule.name, rule.hyper) for rule in rules]),
        state={key: state for part in parts for key, state in part.state.items()},
        inputs=unify_inputs(rules),
        rate=RATE if any(rule.assigns_parameter for rule in rules) else common_rate(rules),
        statistics=statistics,
        **single_attributes(parts),
    )
    taken = {*joined.hyper, *joined.inputs, *RESERVED, *(f"{key}.g" for key in keys), *map(gradient_of, joined.passes)}
    return check_rule(rename_all(joined, short_names(rules, keys, taken)))


def short_names(rules: Sequence[RuleData], keys: Sequence[str], taken: set[str]) -> dict[str, str]:
    """Prefixed name -> name without its prefix, where no other rule has it and it has no other meaning."""
    owners: dict[str, list[str]] = {}
    for rule, key in zip(rules, keys, strict=True):
        for plain in own_names(rule):
            owners.setdefault(plain, []).append(f"{key}.{plain}")
    kept = {full for plain, fulls in owners.items() for full in fulls if len(fulls) > 1 or plain == "direction"}
    short = {fulls[0]: plain for plain, fulls in owners.items() if fulls[0] not in kept and plain not in taken}
    while clashing := {full for full, plain in short.items() if plain in kept}:
        # A name that keeps its prefix may itself be the short form of another: `adam.m` of `outer.adam.m`.
        kept |= clashing
        short = {full: plain for full, plain in short.items() if full not in clashing}
    return short


def single_attributes(rules: Sequence[RuleData]) -> dict[str, Any]:
    """The evaluation point, skip and view of several composed rules; RuleError where two rules have one.

    Two rules may have equal views, and no two may have different ones.
    """
    attributes: dict[str, Any] = {}
    for attribute in _WHOLE:
        having = [rule for rule in rules if getattr(rule, attribute)]
        if attribute == "view" and any(rule.view != having[0].view for rule in having):
            seen = [f"{rule.name} {_view_text(rule)}" for rule in having[:2]]
            raise RuleError(f"{' and '.join(seen)}, and a rule sees tensors in one way: they cannot be composed")
        if attribute != "view" and len(having) > 1:
            raise RuleError(f"{having[0].name} and {having[1].name} both say {attribute}: only one of them may")
        if having:
            attributes[attribute] = getattr(having[0], attribute)
    return attributes


def _view_text(rule: RuleData) -> str:
    said = ", ".join(f"{key}: {value}" for key, value in rule.view.items())
    return f"sees tensors by view {{{said}}}"


def free_name(wanted: str, taken: Sequence[str] | set[str]) -> str:
    """`wanted`, or the first of `wanted_`, `wanted__`, ... that is not taken."""
    while wanted in taken:
        wanted += "_"
    return wanted


def substitute_hyper(rule: AnyRule, values: Mapping[str, Node]) -> AnyRule:
    """The rule with each hyper-parameter in `values` replaced by its expression, wherever the rule reads it.

    Locals are renamed where they clash with a name in the expressions. The set of hyper-parameters stays as it is.
    """
    free = {n for value in values.values() for n in names_in([value])}
    taken = {*own_names(rule), *rule.hyper, *rule.inputs, *free, *FACTS, *CONSTANTS}
    clashing = [plain for plain in own_names(rule) if plain in free and plain not in rule.state]
    rule = rename_all(rule, {plain: free_name(f"{plain}_", taken) for plain in clashing})

    def change(n: Node) -> Node:
        return replace_names(n, values)

    state = {
        key: replace(
            state,
            init=change(state.init),
            shape=None if state.shape is None else tuple(map(change, state.shape)),
            condition=None if state.condition is None else change(state.condition),
            number=None if state.number is None else change(state.number),
        )
        for key, state in rule.state.items()
    }
    kept = () if rule.assigns_parameter or rule.wraps else ("rate",)
    optional: dict[str, Any] = {
        k: change(v) for k in (*kept, "evaluate", "skip", "applies_to") if (v := getattr(rule, k))
    }
    passes, statistics = map_passes(rule.passes, change), map_statistics(rule.statistics, change)
    return replace(
        rule, state=state, inputs=changed_extents(rule.inputs, change), step=map_nodes(rule.step, change),
        passes=passes, statistics=statistics, **optional,
    )  # fmt: skip


_OF_LINES = (Kind.MATRIX, Kind.RANDOM, Kind.REDUCE)
_FIRST = node(Op.EQ, name("t"), const(1))


def with_beginnings(rule: AnyRule) -> AnyRule:
    """The rule with lines for these first values, under their states' conditions.

    Their draws are numbered after those of the step.
    """
    draws, states = count_draws(replace(rule, state={})), dict(rule.state)
    lines: dict[Node | None, list[Statement]] = {}
    for key, state in rule.state.items():
        if any(n.op.kind in _OF_LINES for n in walk([state.init])):
            value = drawn_from(state.init, draws)
            draws += sum(n.op.kind is Kind.RANDOM for n in walk([value]))
            lines.setdefault(state.condition, []).append(Assign(key, value, state.span))
            states[key] = replace(state, init=const(0))
    step: list[Statement] = []
    for condition, assigned in lines.items():
        first = Branch(_FIRST, tuple(assigned), (), assigned[0].span)
        step.append(first if condition is None else Branch(condition, (first,), (), first.span))
    return replace(rule, step=(*step, *rule.step), state=states) if step else rule
