"""The grid and the outcome of a race: learning rates and seeds, losses of every run, and the best rate.

The grid also has the hyper-parameters of each run. The outcome also says how wide the good rates are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from rulec.errors import RulecError
from rulec.language.rule import Rule
from rulec.runtime.engine import default_hyper

Array = np.ndarray[Any, Any]

#: The last part of the steps, over which the final loss is a mean.
LAST = 0.1

#: A good rate keeps this part of the best rate's progress from the first loss.
GOOD = 0.9

#: Points of a curve in JSON and in plots, at most.
POINTS = 100


@dataclass(frozen=True)
class Outcome:
    """All runs of one rule. `losses` and `statistics` have shape (steps, rates, seeds), `measures` (rates, seeds)."""

    label: str
    grid: Grid
    losses: Array
    measures: dict[str, Array]
    seconds: float
    statistics: Mapping[str, Array] = field(default_factory=dict)

    @cached_property
    def final(self) -> Array:
        """The mean loss of the last tenth of the steps of each run; NaN where it diverged."""
        return np.asarray(self.losses[-max(1, round(LAST * len(self.losses))) :].mean(axis=0))

    @cached_property
    def by_rate(self) -> Array:
        """The final loss of each rate, a mean over seeds; infinite where a run diverged."""
        return np.asarray(np.where(np.isnan(self.final), np.inf, self.final).mean(axis=1))

    @cached_property
    def best(self) -> int | None:
        """The place of the rate with the lowest final loss; None where runs diverged at every rate."""
        place = int(np.argmin(self.by_rate))
        return place if np.isfinite(self.by_rate[place]) else None

    @property
    def at_edge(self) -> bool:
        """Whether the best rate is the first or the last of several."""
        return len(self.grid.rates) > 1 and self.best in (0, len(self.grid.rates) - 1)

    @cached_property
    def good(self) -> tuple[int, int] | None:
        """The places of the first and the last rate around the best that keep nine tenths of its progress."""
        if self.best is None:
            return None
        first = float(np.nanmean(self.losses[0]))
        limit = first - GOOD * (first - self.by_rate[self.best])
        fits = self.by_rate <= max(limit, self.by_rate[self.best])
        low = high = self.best
        while low and fits[low - 1]:
            low -= 1
        while high + 1 < len(fits) and fits[high + 1]:
            high += 1
        return low, high

    @property
    def diverged(self) -> Array:
        """Whether each run diverged."""
        return np.asarray(np.isnan(self.losses[-1]))

    def curve(self, rate: int, statistic: str = "") -> tuple[Array, Array]:
        """Steps, and the losses or a statistic of a rate's runs there, of shape (points, seeds).

        A point is the mean of neighbouring steps.
        """
        values = self.statistics[statistic] if statistic else self.losses
        edges = np.unique(np.linspace(0, len(values), min(POINTS, len(values)) + 1).round().astype(int))
        means = [values[a:b, rate].mean(axis=0) for a, b in pairwise(edges.tolist())]
        return edges[1:], np.array(means)

    def row(self) -> dict[str, Any]:
        """The rule's line of the table, as numbers."""
        best, rates = self.best, self.grid.rates
        row: dict[str, Any] = {"rule": self.label, "lr": None, "at_edge": self.at_edge, "loss": None, "spread": None}
        row |= dict.fromkeys((*self.measures, "good_low", "good_high"))
        if best is not None and self.good is not None:
            row |= {"lr": rates[best], "loss": float(self.by_rate[best]), "spread": spread(self.final[best])}
            row |= {name: float(values[best].mean()) for name, values in self.measures.items()}
            row |= {"good_low": rates[self.good[0]], "good_high": rates[self.good[1]]}
        runs = {"diverged": int(self.diverged.sum()), "runs": self.final.size, "steps": len(self.losses)}
        return row | runs | {"seconds": self.seconds}

    def runs(self) -> list[dict[str, Any]]:
        """Every run: its rate, seed, final loss, the step in which it diverged, and the task's figures."""
        listed = []
        for rate, seed in np.ndindex(self.final.shape):
            lost = np.flatnonzero(np.isnan(self.losses[:, rate, seed]))
            run = {"rule": self.label, "lr": self.grid.rates[rate], "seed": self.grid.seeds[seed]}
            run |= {"loss": number(self.final[rate, seed]), "diverged_at": int(lost[0]) + 1 if lost.size else None}
            listed.append(run | {name: number(values[rate, seed]) for name, values in self.measures.items()})
        return listed


def spread(final: Array) -> float:
    """The standard deviation over seeds; 0 for one seed."""
    return float(final.std(ddof=1)) if final.size > 1 else 0.0


def number(value: Any) -> float | None:
    """The number; None for one that is not finite."""
    return float(value) if math.isfinite(value) else None


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
    """A grid of rates spaced by equal ratios, and the seeds from 0; RulecError where it is none.

    A span from a rate to itself has this rate alone.
    """
    low, high = span
    if not (0 < low < math.inf and 0 < high < math.inf):
        raise RulecError(f"the learning rates {low:g}:{high:g} must be positive numbers, as in 1e-4:1e-1")
    if low > high:
        raise RulecError(f"the learning rates {low:g}:{high:g} must go from a smaller to a larger one")
    if rates < 1:
        raise RulecError(f"a race needs at least one learning rate, not {rates}")
    if seeds < 1:
        raise RulecError(f"a race needs at least one seed, not {seeds}")
    spaced = np.geomspace(low, high, rates if low < high else 1)
    return Grid(tuple(map(float, spaced)), tuple(range(seeds)))


def span_of(text: str) -> tuple[float, float]:
    """`1e-4:1e-1`, or one rate, as numbers; RulecError for anything else."""
    low, _, high = text.partition(":")
    try:
        return float(low), float(high or low)
    except ValueError:
        raise RulecError(f"the learning rates {text!r} are neither LOW:HIGH, as in 1e-4:1e-1, nor one rate") from None


def spans_of(texts: list[str]) -> dict[str, tuple[float, float]]:
    """The spans by rule, and by "" for all other rules, of `LOW:HIGH` and `RULE=LOW:HIGH`, or of one rate each."""
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
