"""Counterexamples: properties left open by the proofs are tried with numbers, run by the reference in float64.

A difference refutes a property; no difference proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from rulec.analysis.accumulate import accumulating
from rulec.analysis.flow import Flow
from rulec.compiler.foreseen import decide
from rulec.compiler.inputs import drawn_input
from rulec.compiler.reference import ReferenceOptimizer
from rulec.compiler.routing import applies
from rulec.compiler.view import static_defaults, view_of
from rulec.errors import RulecError
from rulec.language.expr.node import Node, Op, const, name, rewrite
from rulec.language.inputs import LIKE_P, SCALAR, InputKind
from rulec.language.rule_data import Assign, Branch, RuleData, State, Statement

Array = np.ndarray[Any, Any]
Values = list[Array]

#: The shapes of parameters to try, as far as a rule applies to them. A repeated shape stands for a parameter of zeros.
_SHAPES = ((4, 6), (6, 4), (5,), (), (4, 6))
_WARM, _STEPS = 6, 8
#: A relative difference too large for rounding.
_SEEN = 1e-6


@dataclass
class Witness:
    """Tries the properties of one rule. Every answer is whether a counterexample was seen.

    `runs` keeps runs of the reference for several questions.
    """

    flow: Flow
    tried: Sequence[tuple[int, ...]] = _SHAPES
    runs: dict[Hashable, list[ReferenceOptimizer]] = field(default_factory=dict)

    @cached_property
    def rule(self) -> RuleData:
        """The rule as it runs by itself, without a rule for the tensors it leaves out."""
        return replace(self.flow.rule, applies_to=None, otherwise=None)

    @cached_property
    def watched(self) -> RuleData:
        """The same rule with copies of its states: before the step, and those of groups and of the model after it."""
        states, before, after = dict(self.rule.state), [], []
        for key, state in self.rule.state.items():
            shared = state.per in ("group", "model")
            states[f"{key}.before"] = replace(state, init=const(0), per="tensor" if shared else state.per)
            before.append(_where(state, Assign(f"{key}.before", name(key))))
            if shared:
                states[f"{key}.after"] = State(const(0), per="tensor")
                after.append(Assign(f"{key}.after", name(key)))
        return replace(self.rule, state=states, step=(*before, *self.rule.step, *after))

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes to try that the rule applies to."""
        return [shape for shape in self.tried if applies(self.flow.rule, shape, ())]

    @property
    def params(self) -> Values:
        """The parameters at the start: normal numbers, and zeros for a repeated shape."""
        rng = np.random.default_rng(7)
        return [rng.normal(size=s) * (s not in self.shapes[:i]) for i, s in enumerate(self.shapes)]

    def grads(self, step: int) -> Values:
        """The gradients of a step."""
        rng = np.random.default_rng([7, step])
        return [rng.normal(size=s) for s in self.shapes]

    @cached_property
    def hypers(self) -> list[dict[str, float]]:
        """The hyper-parameters to try: the defaults, and larger values for defaults up to 0.01."""
        lifted = {}
        for key, hyper in self.rule.hyper.items():
            small = isinstance(hyper.default, float) and abs(hyper.default) <= 1e-2 and key != "lr" and not hyper.static
            value = next((x for x in (0.3, 1.0, 3.0) if _allowed(self.rule, key, x)), None)
            if small and value is not None:
                lifted[key] = value
        return [{}, lifted] if lifted else [{}]

    def scale_matters(self, *, changing: bool) -> bool:
        """Whether `p` was seen to move differently with scaled gradients, by one number or by one for each step."""

        def differ(hyper: Mapping[str, float]) -> bool:
            (plain,) = self._once(("plain", *hyper), lambda: [self._path(hyper, (1.0,))])
            cycles = [(8.0, 64.0, 1 / 64, 1.0, 512.0)] if changing else [(128.0,), (1 / 128,)]
            runs = (self._path(hyper, cycle) for cycle in cycles)
            return any(_parted(plain.params, other.params, self.params) for other in runs)

        return self._seen(differ)

    def nonlinear(self, state: str) -> bool:
        """Whether the new value of a state was seen not to be affine in the gradient."""

        def bent(hyper: Mapping[str, float]) -> bool:
            runs = self._once(("bent", *hyper), lambda: self._four(hyper))
            states = [self._states(run, state, "after") for run in runs]
            return any(_differs(a + b, c + d) for a, b, c, d in zip(*states, strict=True))

        return self._seen(bent)

    def accumulation_fails(self, adds: Mapping[str, Node]) -> bool:
        """Whether two calls were seen to differ from one call with the sum of their gradients."""
        return any(Witness(self.flow, (shape,))._accumulation_fails(adds) for shape in dict.fromkeys(self.shapes))

    def _accumulation_fails(self, adds: Mapping[str, Node]) -> bool:
        facts = {**view_of(self.rule, self.tried[0]).facts, **static_defaults(self.rule)}
        apart = accumulating(*_decided(replace(self.flow, rule=self.rule), adds, facts))

        def fails(hyper: Mapping[str, float]) -> bool:
            one, two = self.grads(10), self.grads(11)
            sums = [a + b for a, b in zip(one, two, strict=True)]
            at_once = self._after(self.rule, hyper, [*map(self.grads, range(_WARM)), sums])
            in_two = self._optimizer(apart, hyper)
            for k in range(_WARM):
                self._step(in_two, self.grads(k), k, {"phase": 0})
                self._step(in_two, self.grads(k), k, {"phase": 2})
            for grads, phase in ((one, 0), (two, 1), (two, 2)):
                self._step(in_two, grads, _WARM, {"phase": phase})
            return _parted(at_once.params, in_two.params, self.params)

        return self._seen(fails)

    def changes_at_zero(self, key: str, first: bool) -> bool:
        """Whether `p` or a state was seen to change in a step with a gradient of zeros."""

        def changed(hyper: Mapping[str, float]) -> bool:
            old, done = self._once(("zero", first, *hyper), lambda: self._at_zero(hyper, first))
            if key == "p":
                return any(_differs(a, b) for a, b in zip(old.params, done.params, strict=True))
            pairs = zip(self._states(done, key, "before"), self._states(done, key, "after"), strict=True)
            return any(_differs(a, b) for a, b in pairs)

        return self._seen(changed)

    def _seen(self, test: Callable[[Mapping[str, float]], bool]) -> bool:
        for hyper in self.hypers if self.shapes else ():
            try:
                if test(hyper):
                    return True
            except (RulecError, np.linalg.LinAlgError):
                continue
        return False

    def _once(self, key: Hashable, make: Callable[[], list[ReferenceOptimizer]]) -> list[ReferenceOptimizer]:
        """The runs of a key, made for the first question about them."""
        if key not in self.runs:
            self.runs[key] = make()
        return self.runs[key]

    def _four(self, hyper: Mapping[str, float]) -> list[ReferenceOptimizer]:
        """Four runs. Their last gradients are one, another, the sum of both, and zeros."""
        one, two = self.grads(10), self.grads(11)
        zero, both = [0 * g for g in one], [a + b for a, b in zip(one, two, strict=True)]
        return [self._further(self._warm(hyper, _WARM), grads, _WARM) for grads in (one, two, both, zero)]

    def _at_zero(self, hyper: Mapping[str, float], first: bool) -> list[ReferenceOptimizer]:
        """Two runs: before a gradient of zeros, and after it."""
        count = 0 if first else _WARM
        before = self._warm(hyper, count)
        return [before, self._further(before, [0 * g for g in self.grads(0)], count)]

    def _warm(self, hyper: Mapping[str, float], count: int) -> ReferenceOptimizer:
        """A run after `count` ordinary steps."""
        grads = list(map(self.grads, range(count)))
        return self._once(("warm", count, *hyper), lambda: [self._after(self.watched, hyper, grads)])[0]

    def _further(self, run: ReferenceOptimizer, grads: Values, step: int) -> ReferenceOptimizer:
        """A copy of a run, after one more step."""
        run = run.copy()
        self._step(run, grads, step, {})
        return run

    def _optimizer(self, rule: RuleData, hyper: Mapping[str, float]) -> ReferenceOptimizer:
        return ReferenceOptimizer(rule, self.params, dict(hyper))

    def _step(self, run: ReferenceOptimizer, grads: Values, step: int, inputs: Mapping[str, Any]) -> None:
        rng = np.random.default_rng([9, step])
        values = {
            key: 1 + rng.random() if kind == SCALAR else [self._drawn(kind, s, rng) for s in self.shapes]
            for key, kind in self.rule.inputs.items()
        }
        run.step(grads, inputs={**values, "step": step + 1, **inputs})

    def _drawn(self, kind: InputKind, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
        return rng.random(shape) if kind == LIKE_P else drawn_input(self.rule, kind, shape, rng)

    def _after(self, rule: RuleData, hyper: Mapping[str, float], grads: Sequence[Values]) -> ReferenceOptimizer:
        run = self._optimizer(rule, hyper)
        for step, each in enumerate(grads):
            self._step(run, each, step, {})
        return run

    def _path(self, hyper: Mapping[str, float], scales: Sequence[float]) -> ReferenceOptimizer:
        """A run with gradients scaled by each of `scales` in turn."""
        every = [[g * scales[k % len(scales)] for g in self.grads(k)] for k in range(_STEPS)]
        return self._after(self.rule, hyper, every)

    def _states(self, run: ReferenceOptimizer, state: str, when: str) -> Values:
        """The state of each parameter with such a state, `before` or `after` the last step."""
        key = f"{state}.{when}" if f"{state}.{when}" in self.watched.state else state
        states = [run.state(i) for i in range(len(self.shapes))]
        return [s[key] for s in states if key in s]


def _decided(flow: Flow, adds: Mapping[str, Node], facts: Mapping[str, float]) -> tuple[Flow, dict[str, Node]]:
    """The flow and increments for tensors with these shape facts: a tensor of another shape may have other states."""

    def chosen(value: Node) -> Node:
        truth = decide(value.args[0], facts) if value.op is Op.WHERE else None
        return value if truth is None else value.args[1 if truth else 2]

    conditions = {key: state.condition for key, state in flow.rule.state.items()}
    kept = {key for key, condition in conditions.items() if condition is None or decide(condition, facts)}
    states = {key: replace(state, condition=None) for key, state in flow.rule.state.items() if key in kept}
    new = {key: rewrite([value], chosen)[0] for key, value in flow.taken.items() if key in kept or key == "p"}
    parts = {key: rewrite([value], chosen)[0] for key, value in adds.items() if key in kept}
    return replace(flow, rule=replace(flow.rule, state=states), taken=new), parts


def _where(state: State, line: Assign) -> Statement:
    return line if state.condition is None else Branch(state.condition, (line,))


def _allowed(rule: RuleData, key: str, value: float) -> bool:
    try:
        return rule.hyper[key].check(key, value, rule.name) == value
    except RulecError:
        return False


def _finite(*arrays: Array) -> Iterator[tuple[float, ...]]:
    flat = [np.ravel(a) for a in np.broadcast_arrays(*arrays)]
    return (values for values in zip(*flat, strict=True) if np.isfinite(values).all())


def _differs(one: Array, two: Array) -> bool:
    return any(abs(a - b) > _SEEN * max(abs(a), abs(b)) for a, b in _finite(one, two))


def _parted(one: Values, two: Values, start: Values) -> bool:
    """Whether two results from `start` differ by more than rounding."""
    for a, b, s in zip(one, two, start, strict=True):
        for x, y, z in _finite(a, b, s):
            if abs(x - y) > _SEEN * max(abs(x - z), abs(y - z)) + 1e-13 * abs(z):
                return True
    return False
