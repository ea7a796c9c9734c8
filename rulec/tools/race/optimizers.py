"""The optimizers of all runs of one rule: one engine with a group for each run, or an optimizer for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from rulec.analysis.flow import flow_of
from rulec.analysis.structure import scope_of
from rulec.array import Optimizer
from rulec.array.arrays import NumpyArrays
from rulec.compiler.pipeline import compile
from rulec.compiler.routing import Router
from rulec.errors import RulecError
from rulec.language.eval_point import to_evaluation, to_training
from rulec.language.rule import Rule
from rulec.language.rule_data import draws
from rulec.language.statistics import Watch, Watched
from rulec.runtime.engine import Engine
from rulec.runtime.evaluations import EvaluationNames
from rulec.runtime.layers import layers_of
from rulec.runtime.statistics import by_rule
from rulec.tools.race.task import Stack, of_run

Array = np.ndarray[Any, Any]
Run = tuple[int, ...]
#: The losses and gradients where the parameters are.
Gradients = Callable[[], tuple[Array, Stack]]


class Optimizers(Protocol):
    """Steps of many runs."""

    def step(self, losses: Array, grads: Stack, alive: Array, again: Gradients) -> None:
        """One step of the runs that `alive` is true of; `again` evaluates the model at the points of passes."""
        ...

    def evaluation(self) -> Any:
        """A context with the parameters at the point where the model is evaluated."""
        ...

    def measured(self) -> Mapping[str, Mapping[Run, float]]:
        """The statistics of the last step: name -> run -> the mean over its tensors; nothing where none are watched."""
        ...


def optimizers(
    rule: Rule, params: Stack, hyper: Mapping[Run, Mapping[str, float]], tags: Mapping[str, frozenset[str]],
    seeds: Sequence[int], watch: Watch = (),
) -> Optimizers:  # fmt: skip
    """Optimizers over the parameters of all runs, which measure the statistics in `watch`.

    Errors of the rule come before the first step.
    """
    _check_inputs(rule)
    if is_batched(rule, watch):
        return BatchedOptimizer(rule, params, hyper, tags, watch)
    return SeparateOptimizers(rule, params, hyper, tags, seeds, watch)


def is_batched(rule: Rule, watch: Watch = ()) -> bool:
    """Whether a run in a group of its own has the numbers of a run in an optimizer of its own.

    Values of the whole model and random numbers see other runs. Inputs and passes are of one optimizer.
    """
    rules = Router(rule.standalone()).rules
    watched = by_rule(rules, watch) if watch else {}
    of_model = any(watched[id(each)] and _measures_model(each, watched[id(each)]) for each in rules if watched)
    return not (EvaluationNames(rules).count or of_model or any(map(_sees_others, rules)))


def _sees_others(rule: Rule) -> bool:
    of_model = scope_of(flow_of(rule)) == "model" or any(state.per == "model" for state in rule.state.values())
    return of_model or bool(rule.inputs) or draws(rule)


def _measures_model(rule: Rule, watched: Watched) -> bool:
    """Whether a statistic is a number of the whole model, or reads one."""
    program = compile(rule, watch=watched)
    joined = any(join.arg == "model" for join in program.joins)
    return joined or any(not buffer.axes.letters for buffer in program.statistics)


def _check_inputs(rule: Rule) -> None:
    """RulecError where the rule reads something that no task gives."""
    for each in Router(rule).rules:
        for name, kind in each.inputs.items():
            if (name, kind) != ("loss", "scalar"):
                raise RulecError(
                    f"{rule.name} reads the input {name!r} at every step, and a race has the gradient and the loss "
                    f"alone: leave the rule out"
                )


class BatchedOptimizer:
    """One engine with a group for each run: a launch updates all of them."""

    def __init__(
        self, rule: Rule, params: Stack, hyper: Mapping[Run, Mapping[str, float]], tags: Mapping[str, frozenset[str]],
        watch: Watch = (),
    ) -> None:  # fmt: skip
        self._evaluates = any(each.evaluate is not None for each in Router(rule).rules)
        arrays = NumpyArrays()
        self._engine = Engine(rule, arrays, watch=watch)
        self._ids: dict[Run, list[int]] = {}
        #: The run of each place of a statistic: of each tensor, and of each group.
        self._runs: dict[str, Run] = {}
        views = []
        words = {name: tags.get(name, frozenset()) for name in params}
        layers = dict(zip(params, layers_of([*params], [*words.values()]), strict=True))
        for group, run in enumerate(hyper):
            for name, view in of_run(params, run).items():
                arrays.check_parameter(view, name)
                place = f"{name} of run {group}"
                tensor = self._engine.add(view, group, place, words[name], layer=layers[name])
                self._ids.setdefault(run, []).append(tensor)
                views.append(view)
                self._runs[place] = run
        arrays.claim(views, [*self._runs])
        self._runs |= {f"group {group}": run for group, run in enumerate(hyper)}
        self._names = [*params]
        self._table = self._engine.hyper_table([*hyper.values()])
        self._engine.check_hyper(self._table)
        self._alive: list[Run] = []
        self._living: tuple[int, ...] = ()

    def step(self, losses: Array, grads: Stack, alive: Array, again: Gradients) -> None:
        """One step of the runs that `alive` is true of, in the launches of one."""
        runs = [run for run in self._ids if alive[run]]
        if runs != self._alive:
            self._alive, self._living = runs, tuple(i for run in runs for i in self._ids[run])
        values = [of_one[name] for of_one in (of_run(grads, run) for run in runs) for name in self._names]
        self._engine.statistics.begin(bool(self._engine.statistics.names))
        self._engine.step(self._living, values, self._table)

    def measured(self) -> Mapping[str, Mapping[Run, float]]:
        """The statistics of the last step: name -> run that took it -> the mean over its tensors."""
        step = self._engine.statistics.of_step(0, [*self._runs], lambda array: array, self._engine.host.numbers)
        return {name: _means(values, self._runs) for name, values in step.items()}

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Moves the parameters to the evaluation point, and back."""
        if not self._evaluates:
            yield
            return
        self._engine.change(to_evaluation, self._table)
        yield
        self._engine.change(to_training, self._table)


def _means(values: Mapping[str, Any], runs: Mapping[str, Run]) -> dict[Run, float]:
    """The mean of a statistic over the places of each run; `runs` has the run of a place."""
    of_runs: dict[Run, list[Array]] = {}
    for place, value in values.items():
        of_runs.setdefault(runs[place], []).append(np.ravel(value))
    return {run: float(np.concatenate(each).mean()) for run, each in of_runs.items()}


class SeparateOptimizers:
    """An optimizer of arrays for each run, with the run's seed for its random numbers."""

    def __init__(
        self, rule: Rule, params: Stack, hyper: Mapping[Run, Mapping[str, float]], tags: Mapping[str, frozenset[str]],
        seeds: Sequence[int], watch: Watch = (),
    ) -> None:  # fmt: skip
        self._optimizers = {
            run: Optimizer(rule, of_run(params, run), tags=tags, seed=seeds[run[1]], watch=watch or None)
            for run in hyper
        }
        self._stepped: Sequence[Run] = ()
        self._watches = bool(watch)
        for run, values in hyper.items():
            self._optimizers[run].hyper = dict(values)
        self._evaluates = rule.evaluate is not None
        self._reads_loss = any(each.inputs for each in Router(rule).rules)

    def step(self, losses: Array, grads: Stack, alive: Array, again: Gradients) -> None:
        """One step of each run that `alive` is true of. All of them have their passes in the same steps."""
        runs = [run for run in self._optimizers if alive[run]]
        while self._next_pass(runs, losses, grads):
            losses, grads = again()
        for run in runs:
            self._optimizers[run].step(of_run(grads, run), **self._inputs(losses, run))
        self._stepped = runs

    def measured(self) -> Mapping[str, Mapping[Run, float]]:
        """The statistics of the last step: name -> run that took it -> the mean over its tensors."""
        means: dict[str, dict[Run, float]] = {}
        for run in self._stepped if self._watches else ():
            for name, values in self._optimizers[run].statistics().items():
                means.setdefault(name, {}).update(_means(values, dict.fromkeys(values, run)))
        return means

    def _next_pass(self, runs: Sequence[Run], losses: Array, grads: Stack) -> bool:
        """Moves all of these runs to their next points; whether there are any."""
        moved = [self._optimizers[run].next_pass(of_run(grads, run), **self._inputs(losses, run)) for run in runs]
        return any(moved)

    def _inputs(self, losses: Array, run: Run) -> dict[str, Any]:
        return {"loss": float(losses[run])} if self._reads_loss else {}

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Moves the parameters to the evaluation point, and back."""
        moved = [*self._optimizers.values()] if self._evaluates else []
        for optimizer in moved:
            optimizer.eval()
        yield
        for optimizer in moved:
            optimizer.train()
