"""Several rules in one state: a name of which two rules keep different numbers is changed for one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rulec.language.compose import rename_all
from rulec.language.rule import Rule, State


def apart(rules: Sequence[Rule]) -> list[Rule]:
    """The rules with state names that do not clash; equal rules are one object.

    A state of leaves or of groups belongs to each leaf or group, whatever its rule, and keeps its name. A number of the
    model, and a number that another rule keeps as an array, is named after its rule from the second on: `prodigy.d`.
    """
    distinct: dict[Rule, Rule] = {}
    kinds: dict[str, str] = {}
    for rule in rules:
        if rule not in distinct:
            distinct[rule] = _renamed(rule, _clashes(rule, kinds))
            kinds.update((name, _kind(state)) for name, state in reversed([*_states(distinct[rule])]))
    return [distinct[rule] for rule in rules]


def _clashes(rule: Rule, kinds: Mapping[str, str]) -> dict[str, str]:
    """State -> new name, for the states of a rule that clash with states of earlier rules; `kinds` has theirs."""
    new_names: dict[str, str] = {}
    for name, state in _states(rule):
        if name in kinds and (kinds[name] != _kind(state) or kinds[name] == "model"):
            number, new_name = 2, f"{rule.key}.{name}"
            while new_name in kinds:
                number, new_name = number + 1, f"{rule.key}{number}.{name}"
            new_names[name] = new_name
    return new_names


def _states(rule: Rule | None) -> Iterator[tuple[str, State]]:
    """The states of a rule and of the rules to which it routes leaves."""
    while rule is not None:
        yield from rule.state.items()
        rule = rule.rest


def _kind(state: State) -> str:
    """The level of a state that is a number (`tensor`, `group`, `model`); else `array`."""
    return state.per if state.shape is None and state.per in ("tensor", "group", "model") else "array"


def _renamed(rule: Rule, names: Mapping[str, str]) -> Rule:
    """The rule with states renamed, also in the rules to which it routes leaves."""
    if not names:
        return rule
    renamed = rename_all(rule, names)
    if rule.otherwise is None or rule.otherwise.rule is None:
        return renamed
    return replace(renamed, otherwise=replace(rule.otherwise, rule=_renamed(rule.otherwise.rule, names)))
