"""`rulec.race`: trains rules over the same grid on the same task, and compares them.

A contender is all runs of one rule in a race. NumPy's products use one thread: the products of a race are small, and
waiting threads only cost time.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rulec.compiler.routing import Router
from rulec.errors import RulecError
from rulec.language.library.load import load
from rulec.language.rule import Rule
from rulec.language.statistics import Watch
from rulec.language.variants import variants_of
from rulec.runtime.statistics import Statistics, known_of
from rulec.tools.race.optimizers import optimizers
from rulec.tools.race.outcome import HIGH, LOW, Grid, Outcome, grid, span_for
from rulec.tools.race.result import Result
from rulec.tools.race.task import Stack, Task, stacked
from rulec.tools.race.tasks import task_of
from rulec.tools.race.tasks.user import UserTask

#: The lowest and the highest learning rate, or one rate.
Span = tuple[float, float] | float

#: All contenders take the same part of the steps before any of them takes the next.
PARTS = 50


def race(
    rules: Sequence[Rule | str | Path] | Mapping[str, Rule], task: str | Task | Callable[..., Any] = "digits", *,
    lr: Span | Mapping[str, Span] = (LOW, HIGH), rates: int = 8, seeds: int = 3, steps: int | None = None,
    budget: float | None = None, watch: Watch = (), advance: Callable[[str], object] = lambda rule: None,
) -> Result:  # fmt: skip
    """Trains each rule at every learning rate with every seed, and returns losses, best rates and spreads.

    `rules` are rules, library names, compositions or paths; a dict names them. A rule with variants races with each of
    them, by names such as `my.yaml(power=0.5)`. `task` is a name of
    `rulec.tools.race.tasks.TASKS`; or a function, or `my.py:function`, that returns `(params, loss_and_grad)`, as
    `rulec.tools.race.tasks.user.UserTask` says. `lr` is the lowest and the highest of `rates` learning rates, spaced by
    equal ratios, or one rate, or a dict of these by rule, with "" for all others. `steps` is the task's own number by
    default. After `budget` seconds all rules stop at the same step. `watch` are statistics; the outcomes keep their
    values at every step. `advance` is called with a rule's name after each fiftieth of its steps. RulecError for an
    unknown rule or task, or an impossible grid, before any step.
    """
    each = lr if isinstance(lr, Mapping) else {"": lr}
    spans = {label: (span, span) if isinstance(span, int | float) else span for label, span in each.items()}
    variants = {label: variants_of(rule, label) for label, rule in _named(rules).items()}
    named = {name: rule for several in variants.values() for name, rule in several.items()}
    # The learning rates of a rule are those of its variants, where these have none of their own.
    of_rules = {name: span for label, span in spans.items() for name in variants.get(label, (label,))}
    spans = of_rules | {label: span for label, span in spans.items() if label in named}
    for label in spans:
        if label and label not in named:
            raise RulecError(f"learning rates are named for {label!r}, and the race has {', '.join(named)} alone")
    chosen = _task(task)
    count = chosen.steps if steps is None else steps
    if count < 1:
        raise RulecError(f"a race needs at least one step, not {count}")
    if budget is not None and not budget > 0:
        raise RulecError(f"the budget must be a positive number of seconds, not {budget:g}")
    watched = _watched(named, watch)
    contenders = [
        Contender(label, rule, grid(span_for(spans, label), rates, seeds), chosen, watched[label])
        for label, rule in named.items()
    ]
    _train(contenders, count, budget, advance)
    outcomes = [
        Outcome(c.label, c.grid, np.array(c.losses), c.measures(), c.seconds, c.statistics()) for c in contenders
    ]
    return Result(chosen.name, sorted(outcomes, key=lambda outcome: float(outcome.by_rate.min())))


def _watched(named: Mapping[str, Rule], watch: Watch) -> dict[str, Watch]:
    """The part of `watch` that each rule has; RuleError for a word unknown to all rules."""
    rules = {label: Router(rule.standalone()).rules for label, rule in named.items()} if watch else {}
    if watch:
        Statistics([each for several in rules.values() for each in several], watch)
    return {label: known_of(rules[label], watch) if watch else () for label in named}


def _train(contenders: Sequence[Contender], steps: int, budget: float | None, advance: Callable[[str], object]) -> None:
    """All steps by turns, part by part, until the budget is spent: then all have taken the same number."""
    edges = np.unique(np.linspace(0, steps, PARTS + 1).round().astype(int))
    begin = time.perf_counter()
    for first, stop in pairwise(edges.tolist()):
        for contender in contenders:
            contender.advance(stop - first)
            advance(contender.label)
        if budget is not None and time.perf_counter() - begin > budget:
            return


def _named(rules: Sequence[Rule | str | Path] | Mapping[str, Rule]) -> dict[str, Rule]:
    """Rules by the names that tables show; RulecError where there are none, or two of one name."""
    if isinstance(rules, str | Path | Rule):
        rules = [rules]
    if isinstance(rules, Mapping):
        pairs = [*rules.items()]
    else:
        pairs = [(r.name, r) if isinstance(r, Rule) else (str(r), load(r)) for r in rules]
    if not pairs:
        raise RulecError("a race needs at least one rule")
    named: dict[str, Rule] = {}
    for label, rule in pairs:
        if label in named:
            raise RulecError(f"two rules of the race are called {label}: give each of them once, or a dict of names")
        named[label] = rule
    return named


def _task(task: str | Task | Callable[..., Any]) -> Task:
    if isinstance(task, str):
        return task_of(task)
    if callable(task):
        return UserTask(task, getattr(task, "__name__", "task"))
    return task


Array = np.ndarray[Any, Any]


@dataclass
class Contender:
    """Trains the runs of a rule together; RulecError, before the first step, where the rule cannot be raced.

    `watch` are statistics that the rule has. `losses` has the losses of each step, of shape (rates, seeds). A run with
    a loss or gradient that is not finite has diverged: it takes no further step, and its losses are NaN from there on.
    `seconds` leaves out the first step, in which kernels are compiled.
    """

    label: str
    rule: Rule
    grid: Grid
    task: Task
    watch: Watch = ()
    losses: list[Array] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._params = stacked(self.task, len(self.grid.rates), self.grid.seeds)
        self._first = stacked(self.task, 1, self.grid.seeds)
        dtypes = {array.dtype.name for array in self._params.values()}
        hyper = self.grid.hyper(self.rule, "float32" if "float32" in dtypes else "float64")
        self._optimizers = optimizers(self.rule, self._params, hyper, self.task.tags, self.grid.seeds, self.watch)
        self._measured: list[Mapping[str, Mapping[tuple[int, ...], float]]] = []
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

    def statistics(self) -> dict[str, Array]:
        """The statistics of each step, of shape (steps, rates, seeds); NaN for runs that took no step."""
        names = dict.fromkeys(name for step in self._measured for name in step)
        values = {name: np.full((len(self._measured), *self._alive.shape), np.nan) for name in names}
        for place, step in enumerate(self._measured):
            for name, of_runs in step.items():
                for run, value in of_runs.items():
                    values[name][place, *run] = value
        return values

    def _step(self) -> None:
        losses, grads = self._gradients()
        finite = np.isfinite(losses)
        for grad in grads.values():
            finite &= np.isfinite(grad).reshape(*finite.shape, -1).all(axis=-1)
        self._stop(self._alive & ~finite)
        self.losses.append(np.where(self._alive, losses, np.nan))
        if self._alive.any():
            self._optimizers.step(losses, grads, self._alive, self._gradients)
        self._measured.append(self._optimizers.measured() if self._alive.any() else {})

    def _gradients(self) -> tuple[Array, Stack]:
        return self.task.gradients(self._params, len(self.losses), self.grid.seeds)

    def _stop(self, diverged: Array) -> None:
        """Ends runs: their parameters are the first ones again, so that no arithmetic has to carry NaN along."""
        if diverged.any():
            self._alive &= ~diverged
            for name, stack in self._params.items():
                for run in map(tuple, np.argwhere(diverged)):
                    stack[run] = self._first[name][0, run[1]]


def one_thread() -> AbstractContextManager[Any]:
    """A context with one thread for each product; does nothing where threadpoolctl is not installed."""
    control = _control()
    return nullcontext() if control is None else control.limit(limits=1)


@functools.cache
def _control() -> Any:
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    return ThreadpoolController().select(user_api="blas")
