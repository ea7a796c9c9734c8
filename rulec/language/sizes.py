"""Lists in rules: hyper-parameters of several values, states of several entries, and the rule for their lengths.

A rule is written out for its lengths: the list `betas` of three values is the hyper-parameters `betas_0`, `betas_1` and
`betas_2`. For other lengths its text, or its function, is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from rulec.errors import HyperError, RuleError
from rulec.language.rule_data import AnyRule, Make, RuleData, Sizes

#: Most entries of a list, and most passes of a loop.
MAX_LENGTH = 200


def entry(name: str, index: int) -> str:
    """The name of one entry of a list."""
    return f"{name}_{index}"


def entries(name: str, length: int) -> list[str]:
    """The names of all entries of a list."""
    return [entry(name, index) for index in range(length)]


def lists_of(rule: RuleData) -> Mapping[str, int]:
    """The lengths of a rule's lists of hyper-parameters."""
    return {} if rule.sizes is None else rule.sizes.lists


def joined_sizes(rules: Iterable[RuleData], make: Make | None) -> Sizes | None:
    """The lengths of several rules as one set; None where none has any. RuleError where a length differs."""
    lists: dict[str, int] = {}
    counts: dict[str, int] = {}
    for rule in rules:
        for mine, all_of in ((rule.sizes.lists, lists), (rule.sizes.counts, counts)) if rule.sizes else ():
            for name, length in mine.items():
                if all_of.setdefault(name, length) != length:
                    raise RuleError(
                        f"{name} is of length {all_of[name]} in one rule and {length} in {rule.name}: bind one of them"
                    )
    return Sizes(lists, counts, make) if lists or counts else None


def with_sizes(joined: AnyRule, rules: Sequence[AnyRule], join: Callable[[list[AnyRule]], AnyRule]) -> AnyRule:
    """A rule joined of others, with their lengths."""
    sizes = joined_sizes(rules, lambda values: join([resized(rule, values) for rule in rules]))
    return joined if sizes is None else replace(joined, sizes=sizes)


def resized(rule: AnyRule, values: Mapping[str, Any]) -> AnyRule:
    """The rule for the lengths in these values; values of other rules are left out."""
    known = () if rule.sizes is None else {**rule.sizes.lists, **rule.sizes.counts}
    return sized(rule, {name: value for name, value in values.items() if name in known})[0]


def sized(rule: AnyRule, settings: Mapping[str, Any]) -> tuple[AnyRule, dict[str, Any]]:
    """The rule for the lengths in `settings`, and the settings with one value for each entry of a list.

    HyperError for a list that is no list of numbers, and for another length where the lengths of the rule are fixed.
    """
    sizes, plain = rule.sizes, dict(settings)
    if sizes is None:
        return rule, plain
    lists = {name: _values(rule, name, plain.pop(name)) for name in sizes.lists if name in plain}
    counts = {name: int(n) for name in sizes.counts if (n := _number(rule, name, plain.get(name))) is not None}
    lengths = {name: len(values) for name, values in lists.items()} | counts
    known = {**sizes.lists, **sizes.counts}
    changed = [name for name, length in lengths.items() if length != known[name]]
    if changed and sizes.make is None:
        name = changed[0]
        raise HyperError(
            f"{name}={settings[name]!r} of {rule.name} is for another length than the {known[name]} that the rule is "
            f"written out for: begin with the rule's own file"
        )
    if changed:
        rule = cast(AnyRule, sizes.rule(_values_of(rule, sizes, {**known, **lengths})))
    plain |= counts
    for name, values in lists.items():
        plain |= dict(zip(entries(name, len(values)), values, strict=True))
    return rule, plain


def _values_of(rule: RuleData, sizes: Sizes, lengths: Mapping[str, int]) -> dict[str, Any]:
    """Lists of these lengths, of the defaults and then of the last of them, and counts."""
    values: dict[str, Any] = {name: lengths[name] for name in sizes.counts}
    for name, length in sizes.lists.items():
        defaults = [rule.hyper[part].default for part in entries(name, length)]
        numbers = [default for default in defaults if isinstance(default, float)] or [0.0]
        if lengths[name] != length:  # whoever asks has values for it
            values[name] = (numbers + numbers[-1:] * lengths[name])[: lengths[name]]
        elif len(numbers) == length:
            values[name] = numbers
    return values


def _values(rule: RuleData, name: str, value: Any) -> list[Any]:
    """A list's values; HyperError where it is none."""
    shape = getattr(value, "shape", None)
    listed = isinstance(value, list | tuple) or (shape is not None and len(shape) == 1)
    if not listed or not 1 <= len(value) <= MAX_LENGTH:
        raise HyperError(f"{name}={value!r} of {rule.name} must be a list of 1 to {MAX_LENGTH} numbers")
    return [value[i] for i in range(len(value))]


def _number(rule: RuleData, name: str, value: Any) -> float | None:
    """A count's value; None where it is no plain number, which other checks refuse."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return None
    return replace(rule.hyper[name], decides=False).check(name, value, rule.name)
