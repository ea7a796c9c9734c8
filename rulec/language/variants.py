"""Variants of a rule: the values that a study of its hyper-parameters compares, and the rule with each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from rulec.errors import RuleError
from rulec.language.compose.bind import Binding, bind
from rulec.language.expr.names import short
from rulec.language.expr.text import number_text
from rulec.language.parse.located import Text
from rulec.language.rule_data import AnyRule
from rulec.language.source import did_you_mean

#: Most variants of one rule: all combinations of the values.
MAX_VARIANTS = 64

#: Calls a function for a hyper-parameter and the place of one of its values, None for the name alone: an error of the
#: function gets that place in the text.
Placed = Callable[[str, int | None, Callable[[], Any]], Any]


def with_variants(rule: AnyRule, variants: Mapping[str, Sequence[Binding]], placed: Placed) -> AnyRule:
    """The rule with variants; a hyper-parameter without a default gets the first of its values.

    Every value is checked alone: RuleError for an unknown hyper-parameter, for a value outside its range, and for
    values that are equal.
    """
    for key, values in variants.items():
        placed(key, None, partial(_check_name, rule, key))
        for place, value in enumerate(values):
            placed(key, place, partial(_check_value, rule, key, values, place, value))
    count = math.prod(map(len, variants.values()))
    if count > MAX_VARIANTS:
        message = f"{rule.name} has {count} variants, over the limit of {MAX_VARIANTS}: leave some values out"
        placed([*variants][-1], None, partial(_fail, message))
    for key, values in variants.items():
        if key in rule.hyper and rule.hyper[key].default is None:
            rule = placed(key, 0, partial(_with_first, rule, key, values[0]))
    return replace(rule, variants={key: tuple(map(_plain, values)) for key, values in variants.items()})


def variants_of(rule: AnyRule, label: str) -> dict[str, AnyRule]:
    """The variants of a rule by name, `label(power=0.5)`, the last hyper-parameter fastest; without any, the rule."""
    if not rule.variants:
        return {label: rule}
    chosen = [dict(zip(rule.variants, values, strict=True)) for values in product(*rule.variants.values())]
    return {f"{label}({_arguments(each)})": bind(rule, each) for each in chosen}


def _check_name(rule: AnyRule, key: str) -> None:
    if key == "lr":
        raise RuleError("a race tries learning rates by itself: leave lr out of the variants, and give --lr")
    lists = rule.sizes.lists if rule.sizes is not None else {}
    if key not in rule.all_hyper and key not in lists:
        known = [*rule.all_hyper, *lists]
        raise RuleError(f"{rule.name} has no hyper-parameter {short(key)} to vary{did_you_mean(key, known)}")


def _check_value(rule: AnyRule, key: str, values: Sequence[Binding], place: int, value: Binding) -> None:
    if _plain(value) in map(_plain, values[:place]):
        raise RuleError(f"{key} has the value {_text(_plain(value))} twice: give each value once")
    if rule.sizes is not None and key in rule.sizes.lists and isinstance(value, int | float):
        raise RuleError(f"{key} of {rule.name} is a list: give lists of values, such as [[0, 0.9], [0, 0.99]]")
    bound = bind(rule, {key: value})
    unknown = bound.all_hyper.keys() - rule.all_hyper.keys() - {"lr"}
    if unknown and isinstance(value, str | Text):
        name = min(unknown)
        raise RuleError(f"{rule.name} has no hyper-parameter {short(name)}{did_you_mean(name, rule.all_hyper)}")


def _with_first(rule: AnyRule, key: str, value: Binding) -> AnyRule:
    if isinstance(value, str | Text):
        raise RuleError(f"{key} has no default, and the first of its variants is an expression: give it a default")
    return bind(rule, {key: value})


def _fail(message: str) -> None:
    raise RuleError(message)


def _plain(value: Any) -> Any:
    """A value as a number, a text, or a tuple of them."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value.text if isinstance(value, Text) else value


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_text(value)}" for key, value in values.items())


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return value if isinstance(value, str) else number_text(value)
