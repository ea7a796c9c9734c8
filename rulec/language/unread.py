"""Warnings: what nothing reads of a rule, its hyper-parameters, inputs and values. Mostly another name was meant."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from rulec.errors import RuleError
from rulec.language.node import Op, const, names_in
from rulec.language.rule import Assign, Branch, Rule, Statement
from rulec.language.source import Span, rule_error

#: The code of a warning, beside the codes of mistakes.
CODE = "unread"


def unread(rule: Rule) -> list[RuleError]:
    """The warnings of a rule in the order of its text, each with its place where that is known; none is raised."""
    beside, rest = _read_beside_step(rule), None if rule.otherwise is None else rule.otherwise.rule
    read = rule.names_read | beside | (rest.all_hyper.keys() | rest.inputs.keys() if rest else set())
    declared = [("hyper-parameter", key, h.span) for key, h in rule.hyper.items() if not h.decides and "." not in key]
    declared += [("input", key, None) for key in rule.inputs]
    warnings = [_warning(f"nothing reads the {kind} {key}", span) for kind, key, span in declared if key not in read]
    lines: list[Assign] = []
    after = beside | {*rule.state, "p", "direction"}
    _walk_back(rule.step, set(after), lines)
    for line in lines:
        again = line.target in rule.names_read | after
        what = f"{line.target} is assigned again before anything reads it" if again else f"nothing reads {line.target}"
        warnings.append(_warning(what, line.span))
    return sorted(warnings, key=_place)


def _warning(what: str, span: Span | None) -> RuleError:
    return rule_error(f"{what}: read it or remove it", span, CODE)


def _read_beside_step(rule: Rule) -> set[str]:
    """The names that a rule reads outside of its step. The rate of a rule that assigns `p` itself is not read."""
    rate = const(0) if rule.assigns_parameter and not rule.wraps else rule.rate
    return set(names_in(replace(rule, step=(), rate=rate).expressions))


def _walk_back(step: Sequence[Statement], read: set[str], lines: list[Assign]) -> None:
    """Adds the lines of `step` whose value nothing reads, the last one first.

    `read` has the names that are read after the step, and at the end those that are read from its first line on.
    """
    for line in reversed(step):
        if isinstance(line, Branch):
            other = set(read)
            _walk_back(line.then, read, lines)
            _walk_back(line.otherwise, other, lines)
            read |= {*other, *names_in([line.condition])}
            continue
        # The lines of a rule that is called are warned of in its own file.
        if line.value.op is not Op.CALL and "." not in line.target:
            if line.target not in read:
                lines.append(line)
            read.discard(line.target)
        read.update(names_in([line.value]))


def _place(warning: RuleError) -> tuple[int, int]:
    where = re.fullmatch(r".*:(\d+):(\d+)", warning.place)
    return (int(where[1]), int(where[2])) if where else (0, 0)
