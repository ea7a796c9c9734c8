"""The grid of a race: learning rates and seeds, and the hyper-parameters of each run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rulec.errors import RulecError
from rulec.language.rule import Rule
from rulec.runtime.engine import default_hyper

#: The lowest and the highest learning rate of a race where nothing is said.
LOW, HIGH = 1e-4, 1e-1


@dataclass(frozen=True)
class Grid:
    """Learning rates, ascending, and seeds: a rule has a run for every pair of them."""

    rates: tuple[float, ...]
    seeds: tuple[int, ...]

    def hyper(self, rule: Rule, dtype: str) -> dict[tuple[int, ...], dict[str, float]]:
        """The hyper-parameters of every run, by the places of its rate and its seed.

        A further rate, such as Muon's `adamw_lr`, is multiplied as `lr` is. RulecError for a rule without `lr`.
        """
        default = default_hyper(rule, {}, dtype)
        if "lr" not in default:
            raise RulecError(f"{rule.name} has no hyper-parameter lr, over which rules are raced: leave the rule out")
        further = [name for name in default if name.endswith("_lr") and rule.rest is not None]
        table: dict[tuple[int, ...], dict[str, float]] = {}
        for place, rate in enumerate(self.rates):
            share = rate / default["lr"] if default["lr"] else 1.0
            values = {**default, **{name: share * default[name] for name in further}, "lr": rate}
            table |= {(place, seed): values for seed in range(len(self.seeds))}
        return table


def grid(span: tuple[float, float], rates: int, seeds: int) -> Grid:
    """A grid of rates spaced by equal ratios, and the seeds from 0; RulecError where it is none."""
    low, high = span
    if not (0 < low < math.inf and 0 < high < math.inf):
        raise RulecError(f"the learning rates {low:g}:{high:g} must be positive numbers, as in 1e-4:1e-1")
    if low > high or (low == high and rates > 1):
        raise RulecError(f"the learning rates {low:g}:{high:g} must go from a smaller to a larger one")
    if rates < 1:
        raise RulecError(f"a race needs at least one learning rate, not {rates}")
    if seeds < 1:
        raise RulecError(f"a race needs at least one seed, not {seeds}")
    return Grid(tuple(map(float, np.geomspace(low, high, rates))), tuple(range(seeds)))


def span_of(text: str) -> tuple[float, float]:
    """`1e-4:1e-1`, or one rate, as numbers; RulecError for anything else."""
    low, _, high = text.partition(":")
    try:
        return float(low), float(high or low)
    except ValueError:
        raise RulecError(f"the learning rates {text!r} are not LOW:HIGH, as in 1e-4:1e-1") from None


def spans_of(texts: list[str]) -> dict[str, tuple[float, float]]:
    """The spans by rule, and by "" for all other rules, of `LOW:HIGH` and `RULE=LOW:HIGH`."""
    spans: dict[str, tuple[float, float]] = {}
    for text in texts:
        rule, _, span = text.rpartition("=")
        if rule in spans:
            raise RulecError(f"the learning rates of {rule or 'all rules'} are named twice: give them once")
        spans[rule] = span_of(span)
    return spans


def span_for(spans: Mapping[str, tuple[float, float]], label: str) -> tuple[float, float]:
    """The span of a rule."""
    return spans.get(label, spans.get("", (LOW, HIGH)))


_UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds_of(text: str) -> float:
    """`90`, `90s`, `5m` or `1h` in seconds; RulecError for anything else."""
    unit = _UNITS.get(text[-1:])
    try:
        seconds = float(text[:-1] if unit else text) * (unit or 1)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise RulecError(f"the budget {text!r} is no time: use seconds, minutes or hours, as in 30s, 5m, 1h")
    return seconds
