"""A contender: all runs of one rule in a race."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rulec.language.rule import Rule
from rulec.tools.race.grid import Grid
from rulec.tools.race.optimizers import optimizers
from rulec.tools.race.task import Stack, Task, stacked
from rulec.tools.race.threads import one_thread

Array = np.ndarray[Any, Any]


@dataclass
class Contender:
    """Trains the runs of a rule together; RulecError, before the first step, where the rule cannot be raced.

    `losses` has the losses of each step, of shape (rates, seeds). A run with a loss or gradient that is not finite has
    diverged: it takes no further step, and its losses are NaN from there on. `seconds` leaves out the first step, in
    which kernels are compiled.
    """

    label: str
    rule: Rule
    grid: Grid
    task: Task
    losses: list[Array] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._params = stacked(self.task, len(self.grid.rates), self.grid.seeds)
        self._first = stacked(self.task, 1, self.grid.seeds)
        dtypes = {array.dtype.name for array in self._params.values()}
        hyper = self.grid.hyper(self.rule, "float32" if "float32" in dtypes else "float64")
        self._optimizers = optimizers(self.rule, self._params, hyper, self.task.tags, self.grid.seeds)
        self._alive = np.ones((len(self.grid.rates), len(self.grid.seeds)), bool)

    def advance(self, steps: int) -> None:
        """Takes further steps."""
        begin = time.perf_counter()
        with np.errstate(all="ignore"), one_thread():
            for _ in range(steps):
                if not self.losses:
                    self._step()
                    begin = time.perf_counter()
                else:
                    self._step()
        self.seconds += time.perf_counter() - begin

    def measures(self) -> dict[str, Array]:
        """The task's figures where the parameters are evaluated; NaN for runs that diverged."""
        with np.errstate(all="ignore"), self._optimizers.evaluation():
            measures = self.task.measures(self._params, self.grid.seeds)
        return {name: np.where(self._alive, values, np.nan) for name, values in measures.items()}

    def _step(self) -> None:
        losses, grads = self._gradients()
        finite = np.isfinite(losses)
        for grad in grads.values():
            finite &= np.isfinite(grad).reshape(*finite.shape, -1).all(axis=-1)
        self._stop(self._alive & ~finite)
        self.losses.append(np.where(self._alive, losses, np.nan))
        if self._alive.any():
            self._optimizers.step(losses, grads, self._alive, self._gradients)

    def _gradients(self) -> tuple[Array, Stack]:
        return self.task.gradients(self._params, len(self.losses), self.grid.seeds)

    def _stop(self, diverged: Array) -> None:
        """Ends runs: their parameters are the first ones again, so that no arithmetic has to carry NaN along."""
        if diverged.any():
            self._alive &= ~diverged
            for name, stack in self._params.items():
                for run in map(tuple, np.argwhere(diverged)):
                    stack[run] = self._first[name][0, run[1]]
