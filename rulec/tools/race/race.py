"""`rulec.race`: trains rules over the same grid on the same task, and compares them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rulec.errors import RulecError
from rulec.language.library.load import load
from rulec.language.rule import Rule
from rulec.tools.race.contender import Contender
from rulec.tools.race.grid import HIGH, LOW, grid, span_for
from rulec.tools.race.outcome import Outcome
from rulec.tools.race.result import Result
from rulec.tools.race.task import Task
from rulec.tools.race.tasks import task_of
from rulec.tools.race.tasks.user import UserTask

Span = tuple[float, float]

#: All contenders take the same part of the steps before any of them takes the next.
PARTS = 50


def race(
    rules: Sequence[Rule | str | Path] | Mapping[str, Rule], task: str | Task | Callable[..., Any] = "digits", *,
    lr: Span | Mapping[str, Span] = (LOW, HIGH), rates: int = 8, seeds: int = 3, steps: int | None = None,
    budget: float | None = None, advance: Callable[[str], object] = lambda rule: None,
) -> Result:  # fmt: skip
    """Trains each rule at every learning rate with every seed, and returns losses, best rates and spreads.

    `rules` are rules, library names, compositions or paths; a dict names them. `task` is a name of
    `rulec.tools.race.tasks.TASKS`; or a function, or `my.py:function`, that returns `(params, loss_and_grad)`, as
    `rulec.tools.race.tasks.user.UserTask` says. `lr` is the lowest and the highest of `rates` learning rates, spaced by
    equal ratios, or a dict of them by rule, with "" for all others. `steps` is the task's own number by default. After
    `budget` seconds all rules stop at the same step. `advance` is called with a rule's name after each fiftieth of its
    steps. RulecError for an unknown rule or task, or an impossible grid, before any step.
    """
    spans = dict(lr) if isinstance(lr, Mapping) else {"": lr}
    named = _named(rules)
    for label in spans:
        if label and label not in named:
            raise RulecError(f"learning rates are named for {label!r}, and the race has {', '.join(named)} alone")
    chosen = _task(task)
    count = chosen.steps if steps is None else steps
    if count < 1:
        raise RulecError(f"a race needs at least one step, not {count}")
    if budget is not None and not budget > 0:
        raise RulecError(f"the budget must be a positive number of seconds, not {budget:g}")
    contenders = [
        Contender(label, rule, grid(span_for(spans, label), rates, seeds), chosen) for label, rule in named.items()
    ]
    _train(contenders, count, budget, advance)
    outcomes = [Outcome(c.label, c.grid, np.array(c.losses), c.measures(), c.seconds) for c in contenders]
    return Result(chosen.name, sorted(outcomes, key=lambda outcome: float(outcome.by_rate.min())))


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
