"""Checks of a rule as a whole, the same for text, Python and sympy, with errors and warnings.

A warning names what nothing reads: of the rule, its hyper-parameters, inputs and values. Mostly another name was meant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

from rulec.errors import HyperError, RuleError
from rulec.language.evaluations import START, check_passes, gradient_of
from rulec.language.expr.counts import bare_problem, levels_text
from rulec.language.expr.names import BESIDE_STATES, RESERVED, declared_problem, name_problem, short
from rulec.language.expr.node import LEVELS, PLACED, Kind, Node, Op, const, names_in, walk
from rulec.language.expr.static import ALONG
from rulec.language.hyper import Hyper, resolve_hyper, well_known_range
from rulec.language.inputs import matrices_of
from rulec.language.rule_data import (
    FLATTENED,
    AnyRule,
    Assign,
    Branch,
    RuleData,
    Statement,
    assignments,
    conditions,
    placed_level,
)
from rulec.language.sizes import entries, lists_of
from rulec.language.source import Source, Span, did_you_mean, rule_error

#: Most lines of a step: a rule is short, and one composed without end is stopped here.
MAX_LINES = 1000

#: The levels of matrices, and why none of them stands beside an axis or a block.
_OF_MATRICES = ("row", "col", "matrix")
_ONE_WAY = "a kernel sees a tensor in one way, so write axis(0), axis(-1) and dim(i) for rows, columns and their number"

#: Longest name of a rule.
MAX_TITLE = 100

#: The words for the storage of a state: `exact` is float32, whatever format is chosen for the others.
STORAGE = ("exact",)


def check_rule(rule: AnyRule) -> AnyRule:
    """The same rule, checked as a whole; RuleError at the place of a mistake."""
    lines: list[Assign | Branch] = [*assignments(rule.step), *conditions(rule.step)]
    if len(lines) > MAX_LINES:
        raise rule_error(f"{rule.name} has {len(lines)} lines, over the limit of {MAX_LINES}", lines[MAX_LINES].span)
    if problem := title_problem(rule.name):
        raise rule_error(problem)
    check_names(rule)
    _check_result(rule)
    _check_states(rule)
    check_passes(rule)
    check_defaults(rule)
    _check_placed(rule)
    _check_along(rule)
    return rule


def title_problem(title: str) -> str:
    """Why a rule cannot have this title, as a sentence; empty where it can. Generated code quotes the title."""
    if not title.isprintable() or set(title) & set('"\\') or not title.strip():
        return f"the name {short(title)} of a rule is empty or has a quote, backslash or line break"
    return f"the name {short(title)} of a rule has over {MAX_TITLE} characters" if len(title) > MAX_TITLE else ""


def check_names(rule: RuleData, input_places: Mapping[str, Span] | None = None) -> None:
    """RuleError where a name is not allowed, or stands for two things."""
    places = input_places or {}
    owners: dict[str, str] = {}
    declared: list[tuple[str, str, Span | None]] = [
        *((key, "hyper-parameter", hyper.span) for key, hyper in rule.hyper.items()),
        *((key, "state", state.span) for key, state in rule.state.items()),
        *((key, "input", places.get(key)) for key in rule.inputs),
        *((key, "pass", each.span) for key, each in rule.passes.items()),
    ]
    for key, kind, span in declared:
        problem = declared_problem(key)
        if not problem and key == "lr" and kind != "hyper-parameter":
            problem = "'lr' is the learning rate: choose another name"
        if not problem and kind == "state" and key in BESIDE_STATES:
            problem = f"{key!r} is {BESIDE_STATES[key]}: choose another name"
        if not problem and kind == "pass" and (key == START or "." in key):
            problem = f"a pass cannot be called {key!r}: choose another name, such as 'climb'"
        if not problem and key in rule.wraps:
            problem = f"{key!r} is the rule that is wrapped: choose another name"
        if not problem and key in owners:
            problem = f"{key!r} is a {owners[key]} already: choose another name"
        if problem:
            raise rule_error(problem, span)
        owners[key] = kind
    for line in assignments(rule.step):
        problem = "" if line.value.op is Op.CALL else target_problem(rule, line.target)
        if problem:
            raise rule_error(problem, line.span)


def target_problem(rule: RuleData, target: str) -> str:
    """Why a line of the rule's step cannot assign this name, as a sentence; empty where it can."""
    if target in RESERVED:
        return f"{target!r} is {RESERVED[target]} and cannot be assigned: use another name"
    if target in rule.hyper:
        return f"{target!r} is a hyper-parameter and cannot be assigned: use another name"
    if target in rule.inputs:
        return f"{target!r} is an input and cannot be assigned: use another name"
    if target.partition(".")[0] in rule.wraps:
        return f"{target!r} belongs to the rule that is wrapped and cannot be assigned: use another name"
    for key in rule.passes:
        if target == gradient_of(key):
            return f"{target!r} is the gradient at the pass {key!r} and cannot be assigned: use another name"
    if target == "lr":
        return "'lr' is the learning rate and cannot be assigned: use another name"
    return name_problem(target)


def _check_result(rule: RuleData) -> None:
    lines = {line.target: line.span for line in assignments(rule.step)}
    here = next(iter(lines.values()), None)
    if not lines.keys() & {"direction", "p"}:
        raise rule_error(f"{rule.name} assigns neither direction nor p: end its step with direction = ...", here)
    if {"direction", "p"} <= lines.keys():
        raise rule_error(f"{rule.name} assigns both direction and p: keep one of them", lines["p"])
    if "direction" in lines and "direction" not in assigned_always(rule.step):
        raise rule_error("direction is assigned in one branch only: assign it in the other too", lines["direction"])


def assigned_always(step: Sequence[Statement]) -> set[str]:
    """The names with a value after the step on every path through its branches."""
    names: set[str] = set()
    for line in step:
        if isinstance(line, Branch):
            names |= assigned_always(line.then) & assigned_always(line.otherwise)
        else:
            names.add(line.target)
    return names


def _check_states(rule: RuleData) -> None:
    used = {*rule.names_read, *(line.target for line in assignments(rule.step))}
    for expression in (rule.evaluate, rule.skip, *(each.point for each in rule.passes.values())):
        used.update(names_in([expression]) if expression is not None else ())
    for key, state in rule.state.items():
        if problem := level_problem(key, state.per, state.number is not None):
            raise rule_error(problem, state.span)
        if state.per != "element" and state.shape is not None:
            raise rule_error(f"state {key} has both per and shape: keep one of them", state.span)
        if key not in used:
            raise rule_error(f"state {key} is never used: assign it in the step or remove it", state.span)


def level_problem(key: str, per: str, numbered: bool = False) -> str:
    """Why the state cannot be kept per this level, as a sentence; empty where it can. `numbered`: it has a number."""
    if per in PLACED:
        return "" if numbered else f"state {key}: {bare_problem(per)}"
    near = did_you_mean(per, LEVELS) or f": the levels are {levels_text()}"
    return "" if per in LEVELS else f"state {key} is kept per {short(per)}, which is no level{near}"


def _check_placed(rule: RuleData) -> None:
    """RuleError for a rule with axes or blocks and also with matrices: a kernel sees a tensor in one way."""
    placed = placed_level(rule)
    if not placed:
        return
    for value, span in _values(rule):
        for part in walk([value]):
            other = ""
            if part.op.kind is Kind.REDUCE and part.arg in _OF_MATRICES:
                other = f'per="{part.arg}"'
            elif part.op.kind in (Kind.MATRIX, Kind.RANDOM) and not (part.op is Op.INDEX and part.arg is None):
                other = part.op.symbol
            elif part.op is Op.NAME and part.arg in ("rows", "cols"):
                other = str(part.arg)
            if other:
                raise rule_error(f"{rule.name} has {placed} and also {other}: {_ONE_WAY}", span)
    for key, state in rule.state.items():
        if state.per in _OF_MATRICES or state.shape is not None:
            other = f"a state per {state.per}" if state.shape is None else f"{key} with a shape of its own"
            raise rule_error(f"{rule.name} has {placed} and also {other}: {_ONE_WAY}", state.span)
    for key, matrix in matrices_of(rule.inputs).items():
        message = f"{rule.name} has {placed} and also the input {key} with a shape of its own: {_ONE_WAY}"
        raise rule_error(message, matrix.span)
    if rule.view:
        raise rule_error(f"{rule.name} has {placed} and also a view of tensors as matrices: {_ONE_WAY}")


def _check_along(rule: RuleData) -> None:
    """RuleError for a matrix function along an axis, where the view of a tensor is not one matrix."""
    if rule.view == FLATTENED:
        return
    for value, span in _values(rule):
        for part in walk([value]):
            if part.op in ALONG:
                raise rule_error(
                    f"{part.op.symbol} along an axis needs each tensor as one matrix: add view: {{flatten: rest}}", span
                )


def _values(rule: RuleData) -> list[tuple[Node, Span | None]]:
    """The expressions of a rule's step and states, with their places."""
    values = [(line.value, line.span) for line in assignments(rule.step)]
    values += [(branch.condition, branch.span) for branch in conditions(rule.step)]
    values += [(x, s.span) for s in rule.state.values() for x in (s.init, s.condition) if x is not None]
    return values


def storage_problem(rule: RuleData, key: str, word: object) -> str:
    """Why a state of the rule cannot be stored as the word says, as a sentence; empty where it can."""
    if key not in rule.state:
        near = did_you_mean(key, rule.state) or _states_of(rule)
        return f"storage names {short(key)}, which is no state of {rule.name}{near}"
    said = short(word) if isinstance(word, str) else repr(word)
    return "" if word in STORAGE else f"storage of {key} is {said}: the only word is {STORAGE[0]}"


def _states_of(rule: RuleData) -> str:
    return f": its states are {', '.join(rule.state)}" if rule.state else ": it has none"


def with_storage(rule: AnyRule, key: str, word: str) -> AnyRule:
    """The rule with one state stored as the word says."""
    return replace(rule, state={**rule.state, key: replace(rule.state[key], storage=word)})


def check_defaults(rule: RuleData) -> None:
    """RuleError where a range is empty, or a default is outside its range or depends on itself."""
    for key, hyper in rule.hyper.items():
        if hyper.empty:
            raise rule_error(f"no number is in the range of {key}, {hyper.range_text()}", hyper.span)
        if isinstance(hyper.default, float):
            _check_default(rule, [key], {})
    expressions = [key for key, hyper in rule.hyper.items() if isinstance(hyper.default, Node)]
    missing = {key: 1.0 for key, hyper in rule.hyper.items() if hyper.default is None}
    if expressions and not missing:
        _check_default(rule, expressions, {k: h.default for k, h in rule.hyper.items() if isinstance(h.default, float)})


def _check_default(rule: RuleData, keys: list[str], known: dict[str, float]) -> None:
    try:
        resolve_hyper({k: rule.hyper[k] for k in (*known, *keys)}, known, 2.0**-52, rule.name)
    except HyperError as error:
        hyper = rule.hyper[keys[0]]
        raise rule_error(f"{error}{_another_range(rule, keys[0], hyper)}", hyper.span) from None


def _another_range(rule: RuleData, key: str, hyper: Hyper) -> str:
    """How a rule gives a hyper-parameter another range than that of its name, as the end of a sentence."""
    value = hyper.default
    if not isinstance(value, float) or not math.isfinite(value) or hyper.limits != well_known_range(key):
        return ""
    low = max(hyper.min, hyper.above)
    ends = [
        f"min: {min(low, value):g}" if math.isfinite(low) else "",
        f"max: {value:g}" if value >= min(hyper.max, hyper.below) else f"below: {hyper.below:g}",
    ]
    said = ", ".join(end for end in ends if end and not end.endswith("inf"))
    if hyper.span is not None:
        advice = f"{key}: {{default: {value:g}, {said}}}"
    else:
        pairs = said.replace(": ", "=")
        advice = f"hyper=dict({key}=dict({pairs}))" if rule.function else f"{key}: dict(default={value:g}, {pairs})"
    return f", the range of this name: write {advice} for another"


def check_direction_free_of_lr(rule: AnyRule) -> AnyRule:
    """RuleError where `direction` depends on `lr` through lines of the author's own.

    A rule with another name for its learning rate, under `rate`, is held to this name. Lines with a dot in their target
    come from a called or composed rule. An `lr` in such a line was bound on purpose.
    """
    rate = str(rule.rate.arg) if rule.rate.op is Op.NAME else "lr"
    _taint(rule.step, {rate, *(f"{call}.p" for call in rule.wraps)}, rate, decided_by_rate=False)
    return rule


def _taint(step: Sequence[Statement], tainted: set[str], rate: str, decided_by_rate: bool) -> None:
    """Updates `tainted`, the names of values with the learning rate `rate` in them, by these lines."""
    for line in step:
        if isinstance(line, Branch):
            depends = decided_by_rate or bool(tainted.intersection(names_in([line.condition])))
            before = set(tainted)
            _taint(line.then, tainted, rate, depends)
            _taint(line.otherwise, before, rate, depends)
            tainted |= before
        elif "." not in line.target and (decided_by_rate or tainted.intersection(names_in([line.value]))):
            if line.target == "direction":
                raise rule_error(
                    f"direction depends on {rate}, which is applied after it (p = p - {rate}*direction): "
                    f"leave {rate} out, or assign p instead of direction", line.span,
                )  # fmt: skip
            tainted.add(line.target)
        else:
            tainted.discard(line.target)


def check_elementwise(value: Node, what: str, span: Span | None) -> Node:
    """The same value, of elementwise operations only; RuleError for reductions, matrix functions, random numbers."""
    for part in walk([value]):
        if part.op.kind in (Kind.REDUCE, Kind.MATRIX, Kind.RANDOM):
            raise rule_error(f"{part.op.symbol} cannot be part of {what}: use elementwise functions", span)
    return value


#: The code of a warning, beside the codes of mistakes.
CODE = "unread"


def unread(rule: RuleData, elsewhere: Set[str] = frozenset()) -> list[RuleError]:
    """The warnings of a rule in the order of its text, each with its place where that is known; none is raised.

    `elsewhere` are names that are read beside the rule. A rule for other tensors that is written in the same file is
    warned of, too.
    """
    beside, rest = _read_beside_step(rule), None if rule.otherwise is None else rule.otherwise.rule
    mine = rule.names_read | beside | elsewhere
    others: Set[str] = set()
    warnings: list[RuleError] = []
    if rest is not None and _sources(rest) & _sources(rule):
        others, warnings = _read(rest), unread(rest, mine)
    elif rest is not None:
        others = rest.all_hyper.keys() | rest.inputs.keys()
    warnings += [
        _warning(f"nothing reads the {kind} {key}", span)
        for kind, key, names, span in _declared(rule) if (mine | others).isdisjoint(names)
    ]  # fmt: skip
    after = beside | {*rule.state, "p", "direction"}
    for line in _lines(rule, after):
        again = line.target in rule.names_read | after
        what = f"{line.target} is assigned again before anything reads it" if again else f"nothing reads {line.target}"
        warnings.append(_warning(what, line.span))
    return sorted(warnings, key=_place)


def _sources(rule: RuleData) -> set[Source]:
    """The texts of the lines of a step."""
    return {line.span.source for line in assignments(rule.step) if line.span is not None}


def _read(rule: RuleData) -> Set[str]:
    """The names that a rule and its rules for other tensors read."""
    rest = None if rule.otherwise is None else rule.otherwise.rule
    return rule.names_read | _read_beside_step(rule) | (_read(rest) if rest else set[str]())


def _declared(rule: RuleData) -> Iterator[tuple[str, str, set[str], Span | None]]:
    """The hyper-parameters and inputs: the kind and name of each, its names in the step, and its place.

    A list is read where one of its entries is, or its length.
    """
    lists = {name: key for key, length in lists_of(rule).items() for name in entries(key, length)}
    names: dict[str, set[str]] = {}
    for name, hyper in rule.hyper.items():
        if not hyper.decides and "." not in name:
            names.setdefault(lists.get(name, name), set()).add(name)
    for key, each in names.items():
        span = rule.hyper[min(each)].span
        counted = key in lists.values() and span is not None and re.search(rf"\blen\(\s*{key}\s*\)", span.source.text)
        if not counted:
            yield "hyper-parameter", key, each, span
    for key in rule.inputs:
        yield "input", key, {key}, None


def _lines(rule: RuleData, after: Set[str]) -> list[Assign]:
    """The lines whose value nothing reads, in the order of the text; `after` is read after the step.

    A line of text may stand for several: in a loop, or with two results. One of them that is read is enough.
    """
    lines: list[Assign] = []
    kept: set[Span | None] = set()
    _walk_back(rule.step, set(after), lines, kept)
    first = {
        line.span or number: line for number, line in enumerate(lines) if line.span is None or line.span not in kept
    }
    return [*first.values()]


def _warning(what: str, span: Span | None) -> RuleError:
    return rule_error(f"{what}: read it or remove it", span, CODE)


def _read_beside_step(rule: RuleData) -> set[str]:
    """The names that a rule reads outside of its step. The rate of a rule that assigns `p` itself is not read."""
    rate = const(0) if rule.assigns_parameter and not rule.wraps else rule.rate
    measured = [each.value for each in rule.statistics.values()]
    return set(names_in([*replace(rule, step=(), rate=rate).expressions, *measured]))


def _walk_back(
    step: Sequence[Statement], read: set[str], lines: list[Assign], kept: set[Span | None]
) -> None:  # fmt: skip
    """Adds the lines of `step` whose value nothing reads, the last one first, and the places of the others to `kept`.

    `read` has the names that are read after the step, and at the end those that are read from its first line on.
    """
    for line in reversed(step):
        if isinstance(line, Branch):
            other = set(read)
            _walk_back(line.then, read, lines, kept)
            _walk_back(line.otherwise, other, lines, kept)
            read |= {*other, *names_in([line.condition])}
            continue
        # The lines of a rule that is called are warned of in its own file.
        if line.value.op is not Op.CALL and "." not in line.target:
            if line.target not in read:
                lines.append(line)
            else:
                kept.add(line.span)
            read.discard(line.target)
        read.update(names_in([line.value]))


def _place(warning: RuleError) -> tuple[int, int]:
    where = re.fullmatch(r".*:(\d+):(\d+)", warning.place)
    return (int(where[1]), int(where[2])) if where else (0, 0)
