"""Several rules in one state: where their numbers would meet under one name, one of them has another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rulec.language.compose import rename_all
from rulec.language.rule import Rule, State


def apart(rules: Sequence[Rule]) -> list[Rule]:
    """The rules, equal ones made one, each with states that no other before it keeps differently.

    A state of leaves or of groups is each leaf's or group's own, whatever rule it has. A number of the model, and a
    number that is an array by another rule, is named after its rule from the second on, as in `prodigy.d`.
    """
    made: dict[Rule, Rule] = {}
    kinds: dict[str, str] = {}
    for rule in rules:
        if rule not in made:
            made[rule] = _renamed(rule, _clashes(rule, kinds))
            kinds.update((name, _kind(state)) for name, state in reversed([*_states(made[rule])]))
    return [made[rule] for rule in rules]


def _clashes(rule: Rule, kinds: Mapping[str, str]) -> dict[str, str]:
    """New names for the states that others before have in another way, or alike for the whole model."""
    found: dict[str, str] = {}
    for name, state in _states(rule):
        if name in kinds and (kinds[name] != _kind(state) or kinds[name] == "model"):
            number, made = 2, f"{rule.key}.{name}"
            while made in kinds:
                number, made = number + 1, f"{rule.key}{number}.{name}"
            found[name] = made
    return found


def _states(rule: Rule | None) -> Iterator[tuple[str, State]]:
    """The states of a rule, and of those that it routes leaves to."""
    while rule is not None:
        yield from rule.state.items()
        rule = rule.rest


def _kind(state: State) -> str:
    """What a state is kept for, where that is a number; else `array`."""
    return state.per if state.shape is None and state.per in ("tensor", "group", "model") else "array"


def _renamed(rule: Rule, names: Mapping[str, str]) -> Rule:
    """The rule with states renamed, in those that it routes leaves to as well."""
    if not names:
        return rule
    made = rename_all(rule, names)
    if rule.otherwise is None or rule.otherwise.rule is None:
        return made
    return replace(made, otherwise=replace(rule.otherwise, rule=_renamed(rule.otherwise.rule, names)))
