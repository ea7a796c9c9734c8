"""The outcome of a rule in a race: losses of every run, the best rate, and how wide the good rates are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from rulec.tools.race.grid import Grid

Array = np.ndarray[Any, Any]

#: The last part of the steps, over which the final loss is a mean.
LAST = 0.1

#: A good rate keeps this part of the best rate's progress from the first loss.
GOOD = 0.9

#: Points of a curve in JSON and in plots, at most.
POINTS = 100


@dataclass(frozen=True)
class Outcome:
    """All runs of one rule. `losses` has shape (steps, rates, seeds), each of `measures` (rates, seeds)."""

    label: str
    grid: Grid
    losses: Array
    measures: dict[str, Array]
    seconds: float

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

    def curve(self, rate: int) -> tuple[Array, Array]:
        """Steps, and the losses of a rate's runs there, of shape (points, seeds): means of neighbouring steps."""
        edges = np.unique(np.linspace(0, len(self.losses), min(POINTS, len(self.losses)) + 1).round().astype(int))
        means = [self.losses[a:b, rate].mean(axis=0) for a, b in pairwise(edges.tolist())]
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
