"""Statistics: values of a step, measured in the pass that computes the step; a rule declares them, or a user asks.

A statistic is no part of a rule's mathematics. The digest of a rule, its checkpoints, its parameters and its states are
the same with statistics and without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from rulec.errors import RuleError
from rulec.language.evaluations import gradient_of
from rulec.language.expr.names import BASE_NAMES, name_problem, short
from rulec.language.expr.node import Kind, Node, walk
from rulec.language.parse.expression import parse_expression
from rulec.language.parse.located import Text
from rulec.language.rule_data import RuleData, Statistic, assignments
from rulec.language.source import Source, Span, did_you_mean, rule_error

#: The change of the parameter, and the new parameter as its memory keeps it: names of statistics alone.
UPDATE, STORED = "update", "p.stored"

#: The beginning of the names of statistics among the buffers of a program.
PREFIX = "statistics."

#: The place of a number of the whole model.
MODEL = "model"

#: The set of statistics called `norms`, as expressions.
NORMS: Mapping[str, str] = {
    "grad_norm": "norm(grad)",
    "update_norm": "norm(update)",
    "param_norm": "norm(p)",
    "update_ratio": "norm(update)/norm(p)",
    "grad_ratio": "norm(grad)/norm(p)",
    "cosine": "sum(update*grad)/(norm(update)*norm(grad))",
    "nonfinite": "sum(where(isfinite(grad), 0, 1))",
    "unchanged": f"sum(where({STORED} == p, 1, 0))",
}

#: The sets of statistics, by name.
SETS: Mapping[str, Mapping[str, str]] = {"norms": NORMS}

#: Statistics that a user asks for: names of the rule's own and of sets, or expressions by name.
Watch: TypeAlias = str | Sequence[str] | Mapping[str, str]

#: Statistics in the form that programs are compiled with.
Watched: TypeAlias = tuple[tuple[str, Statistic], ...]


def joint_place(letters: str, group: int | None = 0) -> str:
    """The place of a number of several tensors, of axes `letters`: `group 0`, or `model`."""
    return f"group {group}" if "k" in letters else MODEL


def names_of(rule: RuleData) -> list[str]:
    """The names that a statistic of a rule may read."""
    lines = [line.target for line in assignments(rule.step)]
    at_passes = [gradient_of(key) for key in rule.passes]
    names = [*BASE_NAMES, UPDATE, *rule.hyper_with_rate, *rule.state, *rule.inputs, *at_passes, *lines]
    return list(dict.fromkeys(names))


def parsed(rule: RuleData, key: str, text: Text) -> Statistic:
    """The statistic `key` of a rule from its expression; RuleError, with a caret, for a mistake in it."""
    names = names_of(rule)

    def explain(identifier: str) -> str:
        near = did_you_mean(identifier, names) or f": {rule.name} has {', '.join(names[:16])}"
        return f"unknown name {short(identifier)} in the statistic {key}{near}"

    value = parse_expression(text, [*names, STORED], None, explain)
    return Statistic(checked(key, value, text.start), text.start)


def checked(key: str, value: Node, span: Span | None) -> Node:
    """The same expression of a statistic; RuleError for random numbers, which are numbered in the step alone."""
    if any(part.op.kind is Kind.RANDOM for part in walk([value])):
        raise rule_error(f"the statistic {key} draws random numbers: draw them in the step, and name them", span)
    return value


def is_joint(statistic: Statistic) -> bool:
    """Whether a statistic reduces over several tensors."""
    return any(part.op.kind is Kind.REDUCE and part.arg in ("group", "model") for part in walk([statistic.value]))


def watched(rule: RuleData, watch: Watch | None) -> Watched:
    """The statistics of a rule that a user asks for, by name.

    `watch` is the name of a set or of a statistic of the rule, several names, or a mapping of names to expressions.
    Raises RuleError for a name that the rule does not have, and for a mistake in an expression.
    """
    if not watch:
        return ()
    if isinstance(watch, Mapping):
        return tuple((key, _asked(rule, key, text)) for key, text in watch.items())
    chosen: dict[str, Statistic] = {}
    for word in [watch] if isinstance(watch, str) else watch:
        chosen |= _named(rule, word)
    return tuple(chosen.items())


def _asked(rule: RuleData, key: str, text: str) -> Statistic:
    check_text(key, text)
    if problem := name_problem(key):
        raise RuleError(f"a statistic cannot have this name: {problem}")
    return parsed(rule, key, Text(text, Source(f"<watch {key}>", text)))


def check_text(key: str, text: object) -> None:
    """RuleError where the expression of a statistic is no text."""
    if not isinstance(text, str):
        raise RuleError(f"the statistic {key} is an expression in quotes, such as 'norm(update)', not {text!r}")


def _named(rule: RuleData, word: str) -> dict[str, Statistic]:
    """The statistics of a word: of a set, or one that the rule declares, by its name or the end of it."""
    if word in SETS:
        return {key: _asked(rule, key, text) for key, text in SETS[word].items()}
    if word in rule.statistics:
        return {word: rule.statistics[word]}
    endings = [key for key in rule.statistics if key.endswith(f".{word}")]
    if len(endings) == 1:
        return {word: rule.statistics[endings[0]]}
    if endings:
        raise RuleError(f"{rule.name} has several statistics {word!r}: name one of {', '.join(endings)}")
    raise RuleError(unknown(rule.name, word, rule.statistics))


def unknown(title: str, word: str, known: Iterable[str]) -> str:
    """The sentence for a statistic that a rule does not have."""
    names = [*known, *SETS]
    near = did_you_mean(word, names) or f": name one of {', '.join(names)}, or give expressions by name"
    return f"{title} has no statistic {short(word)}{near}"
