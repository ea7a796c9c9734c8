"""Rules run by the reference on numbers of the tests' own: what claims about them are held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import rulec
from rulec import Rule
from rulec.analysis.accumulate import accumulating
from rulec.analysis.flow import flow_of
from rulec.compiler.reference import ReferenceOptimizer
from rulec.compiler.routing import applies
from rulec.language.expr.node import const, name
from rulec.language.hyper import resolve_hyper
from rulec.language.rule_data import Assign, Branch, State

Array = np.ndarray[Any, Any]
Values = list[Array]

EXAMPLES = Path(__file__).parents[1] / "compiler" / "examples"
SHAPES = ((5, 8), (4,), (2, 6, 5))
SMALL = 1e-2

#: Steps before the one that is looked at.
WARM = 7

#: Rules made of others, beside those of the library.
COMPOSED = (
    "clip_by_global_norm >> adamw", "l2 >> momentum", "momentum + decay", "sign >> momentum", "normalize >> sgd",
    "lookahead(momentum)", "schedule_free(sgd)", "low_rank(adam)", "skip_not_finite >> momentum", "lion >> cautious",
    "scale >> signum", "ema(adam)",
)  # fmt: skip


def names() -> list[str]:
    """Every rule of the library that runs by itself, and some made of several."""
    return [*rulec.rules(wrappers=False), *COMPOSED]


@dataclass(frozen=True)
class Trial:
    """One rule, hyper-parameters and drawn numbers: everything follows from the seed.

    `blank` makes the first parameter zero. Where the trial is `steady`, all steps have the same gradients.
    """

    rule: Rule
    hyper: Mapping[str, float]
    seed: int = 0
    blank: bool = False
    steady: bool = False

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes that the rule applies to."""
        return [shape for shape in SHAPES if applies(self.rule, shape, ())]

    @property
    def params(self) -> Values:
        """Where the parameters begin."""
        rng = np.random.default_rng([self.seed, 1])
        return [rng.normal(size=s) * (i > 0 or not self.blank) for i, s in enumerate(self.shapes)]

    def grads(self, step: int) -> Values:
        """Gradients of several sizes, none of them zero."""
        rng = np.random.default_rng([self.seed, 2, 0 if self.steady else step])
        return [rng.normal(size=s) * 10 ** rng.uniform(-1, 1) for s in self.shapes]

    def optimizer(self, rule: Rule | None = None, params: Values | None = None) -> ReferenceOptimizer:
        """A fresh run of the rule, or of one made of it."""
        used = replace(rule or self.rule, applies_to=None, otherwise=None)
        return ReferenceOptimizer(used, self.params if params is None else params, dict(self.hyper), seed=self.seed)

    def step(self, run: ReferenceOptimizer, grads: Values, at: int, **inputs: float) -> None:
        """The step numbered `at`, with inputs that depend on its number alone."""
        rng = np.random.default_rng([self.seed, 3, at])
        drawn: dict[str, Any] = {}
        for key, kind in self.rule.inputs.items():
            drawn[key] = 1 + rng.random() if kind == "scalar" else [rng.random(s) for s in self.shapes]
        run.step(grads, inputs={**drawn, **inputs})

    def after(
        self, grads: Sequence[Values], rule: Rule | None = None, params: Values | None = None
    ) -> ReferenceOptimizer:
        """The run after these gradients."""
        run = self.optimizer(rule, params)
        for step, each in enumerate(grads):
            self.step(run, each, step)
        return run

    def path(self, scales: Sequence[float]) -> Values:
        """The parameters after as many steps as there are scales of the gradients."""
        return self.after([[c * g for g in self.grads(k)] for k, c in enumerate(scales)]).params

    @cached_property
    def straight(self) -> Values:
        """The parameters after `WARM + 1` steps of gradients as they are."""
        return self.path([1.0] * (WARM + 1))

    @cached_property
    def fresh(self) -> ReferenceOptimizer:
        """A watched run that has taken no step."""
        return self.optimizer(watched(self.rule))

    @cached_property
    def warm(self) -> ReferenceOptimizer:
        """A watched run after `WARM` steps."""
        return self.after([self.grads(k) for k in range(WARM)], watched(self.rule))

    def further(self, run: ReferenceOptimizer, grads: Values, at: int) -> ReferenceOptimizer:
        """What a run becomes by the step numbered `at`."""
        run = run.copy()
        self.step(run, grads, at)
        return run

    @cached_property
    def affine(self) -> list[ReferenceOptimizer]:
        """What the warm run becomes by one gradient, by another, by both together, and by none."""
        one, two = self.grads(10), self.grads(11)
        both = [a + b for a, b in zip(one, two, strict=True)]
        return [self.further(self.warm, g, WARM) for g in (one, two, both, [0 * g for g in one])]

    @cached_property
    def without(self) -> tuple[ReferenceOptimizer, ReferenceOptimizer]:
        """What a fresh run, and the warm one, become by a gradient of zeros."""
        zero = [0 * g for g in self.grads(0)]
        return self.further(self.fresh, zero, 0), self.further(self.warm, zero, WARM)


def hypers(rule: Rule, where: Sequence[str] = ()) -> dict[str, float]:
    """Values that meet conditions such as `eps = 0`; by default, what is to be positive is so."""
    keys = [condition.removesuffix(" = 0") for condition in where]
    return {key: 0.0 for key in keys if key in rule.standalone().hyper}


def lifted(rule: Rule) -> dict[str, float]:
    """Values far enough from 0 to be felt, for hyper-parameters that are 0 or small by default."""
    alone = rule.standalone()
    small = resolve_hyper(alone.hyper, {}, 2.0**-52, rule.name)
    found = {}
    for key, hyper in alone.hyper.items():
        felt = 1.0 if hyper.whole else 0.4
        value = felt if hyper.max >= felt and hyper.below > felt else hyper.max
        if key != "lr" and not hyper.static and abs(small[key]) <= SMALL and value >= max(hyper.min, hyper.above):
            found[key] = value
    return found


def watched(rule: Rule) -> Rule:
    """The rule with what each of its states was before the step, and shared ones after it, as states of tensors."""
    alone = rule.standalone()
    states, first, last = dict(alone.state), [], []
    for key, state in alone.state.items():
        shared = state.per in ("group", "model")
        states[f"old.{key}"] = State(const(0), per="tensor") if shared else replace(state, init=const(0))
        line = Assign(f"old.{key}", name(key))
        first.append(line if state.condition is None else Branch(state.condition, (line,)))
        if shared:
            states[f"new.{key}"] = State(const(0), per="tensor")
            last.append(Assign(f"new.{key}", name(key)))
    return replace(alone, state=states, step=(*first, *alone.step, *last))


def before_and_after(run: ReferenceOptimizer, key: str) -> list[tuple[Array, Array]]:
    """A state of every tensor that has it, before the last step and after it."""
    found = [run.state(i) for i in range(len(run.params))]
    return [(s[f"old.{key}"], s[f"new.{key}" if f"new.{key}" in s else key]) for s in found if f"old.{key}" in s]


def far_apart(one: Values, two: Values, start: Values, least: float) -> bool:
    """Whether two ways from `start` part by more than `least`, in parts of the longer one."""
    for a, b, s in zip(one, two, start, strict=True):
        size = np.maximum(np.abs(a - s), np.abs(b - s))
        gap = np.abs(a - b) > least * size + 1e-12 * np.abs(s)
        if bool(np.any(gap & np.isfinite(a) & np.isfinite(b))):
            return True
    return False


def two_calls(trial: Trial) -> tuple[Values, Values]:
    """`p` after a step with the sum of two gradients, and after two calls with one each.

    The last phase is given no gradient at all: only the states can have brought the sum.
    """
    flow = flow_of(trial.rule)
    apart = accumulating(flow, trial.rule.analysis.accumulates.adds)
    warm, one, two = [trial.grads(k) for k in range(WARM)], trial.grads(20), trial.grads(21)
    at_once = trial.after([*warm, [a + b for a, b in zip(one, two, strict=True)]])
    run = trial.optimizer(apart)
    for k, grads in enumerate(warm):
        trial.step(run, grads, k, phase=0, step=k + 1)
        trial.step(run, grads, k, phase=2, step=k + 1)
    for grads, phase in ((one, 0), (two, 1), ([0 * g for g in two], 2)):
        trial.step(run, grads, WARM, phase=phase, step=WARM + 1)
    return at_once.params, run.params
