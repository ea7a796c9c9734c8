"""Warnings: what nothing reads of a rule, its hyper-parameters, inputs and values. Mostly another name was meant."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

from rulec.errors import RuleError
from rulec.language.expr.node import Op, const, names_in
from rulec.language.rule import Assign, Branch, Rule, Statement, assignments
from rulec.language.sizes import entries, lists_of
from rulec.language.source import Source, Span, rule_error

#: The code of a warning, beside the codes of mistakes.
CODE = "unread"


def unread(rule: Rule, elsewhere: Set[str] = frozenset()) -> list[RuleError]:
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


def _sources(rule: Rule) -> set[Source]:
    """The texts of the lines of a step."""
    return {line.span.source for line in assignments(rule.step) if line.span is not None}


def _read(rule: Rule) -> Set[str]:
    """The names that a rule and its rules for other tensors read."""
    rest = None if rule.otherwise is None else rule.otherwise.rule
    return rule.names_read | _read_beside_step(rule) | (_read(rest) if rest else set[str]())


def _declared(rule: Rule) -> Iterator[tuple[str, str, set[str], Span | None]]:
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


def _lines(rule: Rule, after: Set[str]) -> list[Assign]:
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


def _read_beside_step(rule: Rule) -> set[str]:
    """The names that a rule reads outside of its step. The rate of a rule that assigns `p` itself is not read."""
    rate = const(0) if rule.assigns_parameter and not rule.wraps else rule.rate
    return set(names_in(replace(rule, step=(), rate=rate).expressions))


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
