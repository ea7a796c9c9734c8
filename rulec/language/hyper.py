"""Hyper-parameters: their defaults, their ranges, their values when a step runs, and the seed of random numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict, cast

import numpy as np

from rulec.errors import HyperError
from rulec.language.expr.arithmetic import number_known
from rulec.language.expr.node import Node, name, names_in
from rulec.language.source import Span, did_you_mean


class Limits(TypedDict, total=False):
    """The range of a hyper-parameter, as keywords of `Hyper`."""

    min: float
    max: float
    above: float
    below: float


#: Ranges of well-known hyper-parameters: (pattern of the whole name, keywords of `Hyper`).
WELL_KNOWN: tuple[tuple[str, Limits], ...] = (
    (r"lr|lr_at_start", {"min": 0.0}),
    (r"beta\d*|betas(_\d+)?|momentum", {"min": 0.0, "below": 1.0}),
    (r"eps\d*", {"min": 0.0}),
    (r"weight_decay", {"min": 0.0}),
)

#: The learning rate of a rule that assigns `direction` and names none.
DEFAULT_LR = 1e-3

#: The hyper-parameter for the learning rate that a group began with. Optimizers keep its value, `lr` at first.
AT_START = "lr_at_start"


def well_known_range(hyper_name: str) -> Limits:
    """The built-in range of a hyper-parameter of this name; empty where it has no built-in range."""
    for pattern, limits in WELL_KNOWN:
        if re.fullmatch(pattern, hyper_name):
            return limits
    return {}


@dataclass(frozen=True)
class Hyper:
    """A hyper-parameter: its default, and the range of its values.

    `default` is a number, an expression of other hyper-parameters, or None where another rule must supply it.
    `min` and `max` belong to the range, `above` and `below` do not. A `whole` hyper-parameter has whole numbers as its
    values. The value of a `static` one is known when a kernel is made, and of one that `decides` how many states or
    lines a rule has, when the rule is made. One that `follows` the learning rate is a second rate: its value is the
    one at the start, and a step takes it times `lr/lr_at_start`.
    """

    default: float | Node | None
    min: float = -math.inf
    max: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    static: bool = False
    whole: bool = False
    decides: bool = False
    follows: bool = False
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def limits(self) -> Limits:
        """The finite ends of the range, by their keywords."""
        limits = {k: getattr(self, k) for k in Limits.__annotations__ if getattr(self, k) != getattr(Hyper, k)}
        return cast(Limits, limits)

    @property
    def ends(self) -> list[tuple[str, float]]:
        """The finite ends of the range, each with its comparison: `(">=", 0.0)` for values from 0."""
        signs = (("min", ">="), ("above", ">"), ("max", "<="), ("below", "<"))
        limits: Mapping[str, Any] = self.limits
        return [(sign, limits[key]) for key, sign in signs if key in limits]

    @property
    def empty(self) -> bool:
        """Whether no number lies in the range."""
        low, high = max(self.min, self.above), min(self.max, self.below)
        return low > high or (low == high and low in (self.above, self.below) and math.isfinite(low))

    def range_text(self) -> str:
        """The range in words: `at least 0 and below 1`, `a whole number, at least 1`; empty for all numbers."""
        limits = (("at least", self.min), ("above", self.above), ("at most", self.max), ("below", self.below))
        ends = " and ".join(f"{word} {value:g}" for word, value in limits if math.isfinite(value))
        return ", ".join(part for part in ("a whole number" if self.whole else "", ends) if part)

    def check(self, hyper_name: str, value: Any, owner: str) -> float:
        """`value` as a float; HyperError where it is outside the range, NaN, or no number. `owner` names the rule."""
        if callable(value):
            raise HyperError(
                f"{hyper_name} of {owner} is a function, where a number belongs: give its value anew before each step"
            )
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        inside = self.min <= number <= self.max
        inside &= number > self.above or math.isinf(self.above)
        inside &= number < self.below or math.isinf(self.below)
        inside &= number.is_integer() or not self.whole
        if not inside:
            raise HyperError(f"{hyper_name}={value!r} of {owner} must be {self.range_text() or 'a number'}")
        if self.decides and number != self.default:
            raise HyperError(
                f"{hyper_name}={value!r} of {owner} decides how many states or lines the rule has, and it was written "
                f"out for {self.default:g}: load the rule for another, or make a new optimizer"
            )
        return number


def resolve_hyper(
    hyper: Mapping[str, Hyper], settings: Mapping[str, Any], machine_eps: float, owner: str
) -> dict[str, float]:
    """The value of every hyper-parameter, from `settings` or by default, in the order of `hyper`.

    Defaults that are expressions, such as `sqrt(beta2)`, are evaluated in float64 with this `machine_eps`. Raises
    HyperError for an unknown name, a value outside its range, a missing default, and defaults that depend on each
    other; `owner` names the rule in it.
    """
    resolved: dict[str, float] = {}
    for key, value in settings.items():
        if key not in hyper:
            raise HyperError(f"{owner} has no hyper-parameter {key!r}{did_you_mean(key, hyper)}")
        resolved[key] = hyper[key].check(key, value, owner)
    pending = {key: hyper[key].default for key in hyper if key not in settings}

    def number(key: str, default: float | Node, values: Mapping[str, float]) -> float:
        known = number_of(default, values) if isinstance(default, Node) else default
        return hyper[key].check(key, known, owner)

    values = work_out(pending, {"machine_eps": machine_eps, **resolved}, number, owner)
    return {key: values[key] for key in hyper}


def work_out(
    defaults: Mapping[str, float | Node | None], values: Mapping[str, Any],
    number: Callable[[str, float | Node, Mapping[str, Any]], Any], owner: str,
) -> dict[str, Any]:  # fmt: skip
    """The `values` and the values of the defaults, each as soon as its names are known: `number` gives one by name.

    HyperError where there is no default, and where defaults depend on each other; `owner` names the rule.
    """
    known, pending = dict(values), dict(defaults)
    while pending:
        ready = [k for k, v in pending.items() if not isinstance(v, Node) or set(names_in([v])) <= known.keys()]
        if not ready:
            raise HyperError(
                f"the defaults of {' and '.join(pending)} of {owner} depend on each other: give one of them"
            )
        for key in ready:
            default = pending.pop(key)
            if default is None:
                raise HyperError(f"{key} of {owner} has no default: give it a value")
            known[key] = number(key, default, known)
    return known


def with_start(hyper: Mapping[str, Hyper]) -> dict[str, Hyper]:
    """The hyper-parameters of an optimizer, with `lr_at_start` where a second learning rate follows `lr`."""
    if "lr" not in hyper or AT_START in hyper or not any(each.follows for each in hyper.values()):
        return dict(hyper)
    return {**hyper, AT_START: Hyper(name("lr"), **well_known_range(AT_START))}


def followers(hyper: Mapping[str, Hyper]) -> list[str]:
    """The hyper-parameters of an optimizer that follow its `lr`."""
    return [key for key, each in hyper.items() if each.follows] if {"lr", AT_START} <= hyper.keys() else []


def rate_ratio(now: float, start: float) -> float:
    """The factor of second learning rates at the rate `now`; 1 where a group began at 0."""
    return now / start if start > 0 else 1.0


def followed(hyper: Mapping[str, Hyper], values: Mapping[str, float]) -> dict[str, float]:
    """The values for a step: second learning rates have followed `lr`."""
    second = followers(hyper)
    if not second:
        return dict(values)
    factor = rate_ratio(values["lr"], values[AT_START])
    return {**values, **{key: values[key] * factor for key in second}}


def number_of(value: Node, names: Mapping[str, float]) -> float:
    """The value of an expression of numbers and names, in float64."""
    number = number_known(value, names)
    assert number is not None  # `names` has every name in the expression
    return number


def checked_seed(seed: Any) -> int:
    """The seed as an int; HyperError where it is not a whole number from 0 to 2**32 - 1."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise HyperError(f"seed={seed!r} must be a whole number from 0 to 2**32 - 1")
    return int(seed)
