"""Random compositions of transforms, wrappers and rules, beside their pieces stepped by hand.

The pieces are run line by line on NumPy arrays, one after the other, and the wrappers around them are written out
here: what is composed, compiled and run must give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import rshift
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

import rulec
from rulec import Rule
from rulec.array import Optimizer
from rulec.compiler.reference import ReferenceOptimizer
from rulec.language.expr.node import Kind, Op, walk
from tests.compiler.plain import Array, PlainRun
from tests.library import single

STEPS, SHAPE = 9, (1, 3, 4)


def by_reference(rule: Rule, param: Array, grads: Sequence[Array]) -> list[Array]:
    """The compiled rule by the reference, in float64."""
    optimizer, found = ReferenceOptimizer(rule, [param]), []
    for g in grads:
        optimizer.step([g])
        found.append(optimizer.params[0].copy())
    return found


def is_plain(rule: Rule) -> bool:
    """Whether the rule can be run by hand: one tensor as it is, no matrix functions, no random numbers."""
    parts = list(walk(rule.expressions))
    wide = {state.per for state in rule.state.values()} | {n.arg for n in parts if n.op.kind is Kind.REDUCE}
    own = rule.skip or rule.applies_to or rule.evaluate or rule.view or rule.inputs
    shaped = any(state.shape or state.condition for state in rule.state.values())
    matrix = any(n.op.kind in (Kind.MATRIX, Kind.RANDOM) for n in parts)
    return not (own or shaped or matrix or wide & {"group", "model"})


PLAIN = [name for name in rulec.rules(wrappers=False) if is_plain(rulec.load(name))]
RULES = [name for name in PLAIN if not name.startswith("transforms/") and "lr" in rulec.load(name).hyper]
TRANSFORMS = [name for name in PLAIN if name.startswith("transforms/") and rulec.load(name).reads("g")]
ENDS = ["sign", "scale", "normalize"]


def part(name: str, number: int) -> Rule:
    """A rule of the library with hyper-parameters of its own, but for the learning rate, which is 0.01."""
    rule = rulec.load(name)
    rule = rule.bind(**{key: f"{key}_{number}" for key, h in rule.hyper.items() if key != "lr" and not h.decides})
    return rule.bind(lr=0.01) if "lr" in rule.hyper else rule


class Pieces:
    """Rules one after the other, the last one's direction applied; and one more whose direction is added."""

    def __init__(self, rules: Sequence[Rule], added: Rule | None, param: Array) -> None:
        self.runs = [PlainRun(rule, param, _defaults(rule)) for rule in rules]
        self.added = None if added is None else PlainRun(added, param, _defaults(added))
        self.p = param

    def update(self, g: Array, grad: Array) -> None:
        """One step with the input `g`, where `grad` is the gradient itself."""
        names: dict[str, Any] = {"direction": g}
        for run in self.runs:
            run.p = self.p
            names = run.step(np.asarray(names["direction"], np.float64), grad)
        if self.runs[-1].rule.assigns_parameter:
            self.p = np.array(np.broadcast_to(names["p"], self.p.shape))
            return
        direction = names["direction"]
        if self.added is not None:
            self.added.p = self.p
            direction = direction + self.added.step(g, grad)["direction"]
        lr = next((run.hyper["lr"] for run in self.runs if "lr" in run.hyper), 1e-3)
        self.p = np.array(np.broadcast_to(self.p - lr * direction, self.p.shape))


def _defaults(rule: Rule) -> dict[str, float]:
    from rulec.language.hyper import resolve_hyper

    return resolve_hyper(rule.hyper, {}, 2.0**-52, rule.name)


class Around:
    """A wrapper written out: it steps what is inside, and moves its parameter."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.t = inner, 0

    @property
    def p(self) -> Array:
        return np.asarray(self.inner.p)

    @p.setter
    def p(self, value: Array) -> None:
        self.inner.p = value


class Lookahead(Around):
    """Every 5 steps the slow weights go half of the way, and the fast ones begin again there."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.slow = self.p

    def update(self, g: Array, grad: Array) -> None:
        """One step."""
        self.t += 1
        self.inner.update(g, grad)
        if self.t % 5 == 0:
            self.slow = self.slow + 0.5 * (self.p - self.slow)
            self.p = self.slow


class Average(Around):
    """The average is kept beside, and changes nothing."""

    def update(self, g: Array, grad: Array) -> None:
        """One step."""
        self.inner.update(g, grad)


class Accumulate(Around):
    """Every 4 steps one with the mean of the gradients."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.held: list[Array] = []

    def update(self, g: Array, grad: Array) -> None:
        """One step."""
        self.held.append(g)
        if len(self.held) == 4:
            mean = sum(self.held) / 4
            self.held = []
            self.inner.update(mean, mean)


class ScheduleFree(Around):
    """The average of the points that the rule goes to, and the gradient between it and the last of them."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.z = self.p

    def update(self, g: Array, grad: Array) -> None:
        """One step; the learning rate stays the same, so all points weigh the same.

        The average is found again between the parameter and the last point, in case the parameter was moved.
        """
        self.t += 1
        y = self.p
        x = (y - 0.1 * self.z) / 0.9
        self.inner.update(g, grad)
        self.z = self.z + (self.p - y)
        x = x + (self.z - x) / self.t
        self.p = 0.9 * x + 0.1 * self.z


class Before(Around):
    """Transforms before something that has a parameter of its own."""

    def __init__(self, rules: Sequence[Rule], inner: Any) -> None:
        super().__init__(inner)
        self.runs = [PlainRun(rule, self.p, _defaults(rule)) for rule in rules]

    def update(self, g: Array, grad: Array) -> None:
        """One step."""
        for run in self.runs:
            run.p = self.p
            g = np.asarray(run.step(g, grad)["direction"], np.float64)
        self.inner.update(g, grad)


BY_HAND = {"lookahead": Lookahead, "ema": Average, "accumulate": Accumulate, "schedule_free": ScheduleFree}


@dataclass(frozen=True)
class Drawn:
    """One composition: wrappers, outermost first, around a chain of transforms and a rule; and transforms before."""

    before: tuple[str, ...]
    wrappers: tuple[str, ...]
    inside: tuple[str, ...]
    rule: str
    decayed: bool

    def parts(self) -> tuple[list[Rule], list[Rule], Rule | None]:
        """The transforms before, those inside with the rule, and what is added."""
        before = [part(name, number) for number, name in enumerate(self.before)]
        inside = [part(name, len(before) + number) for number, name in enumerate((*self.inside, self.rule))]
        decay = part("decay", 99) if self.decayed and not inside[-1].assigns_parameter else None
        return before, inside, decay

    def composed(self) -> Rule:
        """The rule that they make."""
        before, inside, decay = self.parts()
        rule = reduce(rshift, inside)
        rule = rule if decay is None else rule + decay
        for name in reversed(self.wrappers):
            wrapper = rulec.load(name)
            rule = wrapper(*[rule] * len(wrapper.wraps))
        return reduce(rshift, [*before, rule])

    def by_hand(self, param: Array) -> Any:
        """The same, piece by piece."""
        before, inside, decay = self.parts()
        run: Any = Pieces(inside, decay, param)
        for name in reversed(self.wrappers):
            run = BY_HAND[name](run)
        return Before(before, run)


transforms = st.sampled_from(TRANSFORMS)
drawn = st.builds(
    Drawn,
    st.lists(transforms, max_size=2).map(tuple),
    st.lists(st.sampled_from(sorted(BY_HAND)), max_size=2, unique=True).map(tuple),
    st.lists(transforms, max_size=2).map(tuple),
    st.sampled_from(RULES),
    st.booleans(),
).filter(lambda d: 2 <= len(d.before) + len(d.wrappers) + len(d.inside) + d.decayed <= 3)


def examples(count: int) -> settings:
    """Settings for so many: one that fails is small as it was drawn, and to look for a smaller one takes minutes."""
    phases = (Phase.explicit, Phase.generate)
    return settings(deadline=None, max_examples=count, suppress_health_check=list(HealthCheck), phases=phases)


def trial(seed: int) -> tuple[Array, list[Array]]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=SHAPE), [rng.normal(size=SHAPE) for _ in range(STEPS)]


def fits(make: Callable[[], Rule]) -> Rule:
    """The rule, where the mathematics allows it: an average of an average, say, is refused with a reason."""
    try:
        return make()
    except rulec.RuleError as error:
        assume("only one of them may" not in error.message)
        raise


@given(drawn, st.integers(0, 1000))
@examples(15)
def test_a_composition_is_its_pieces_stepped_by_hand(composition: Drawn, seed: int) -> None:
    check_against_its_pieces(composition, seed)


@pytest.mark.slow
@given(drawn, st.integers(0, 1000))
@examples(150)
def test_many_compositions_are_their_pieces_stepped_by_hand(composition: Drawn, seed: int) -> None:
    check_against_its_pieces(composition, seed)


def check_against_its_pieces(composition: Drawn, seed: int) -> None:
    """Steps a composition by the reference and its pieces by hand."""
    rule = fits(composition.composed)
    param, grads = trial(seed)
    run = composition.by_hand(param)
    for found, g in zip(by_reference(rule, param, grads), grads, strict=True):
        run.update(g, g)
        np.testing.assert_allclose(found, run.p, rtol=1e-10, atol=1e-12)


@given(st.tuples(transforms, transforms), st.sampled_from(RULES), st.integers(0, 1000))
@examples(20)
def test_chains_are_associative(names: tuple[str, str], rule: str, seed: int) -> None:
    a, b, c = part(names[0], 0), part(names[1], 1), part(rule, 2)
    param, grads = trial(seed)
    one, other = by_reference((a >> b) >> c, param, grads), by_reference(a >> (b >> c), param, grads)
    np.testing.assert_array_equal(one, other)


@given(drawn)
@examples(20)
def test_a_composition_is_written_and_read_again(composition: Drawn) -> None:
    rule = fits(composition.composed)
    assert rulec.parse(rule.to_yaml()) == rule
    assert rulec.compile(rule).stages == rulec.compile(rulec.parse(rule.to_yaml())).stages


def is_determined(rule: Rule) -> bool:
    """Whether rounding moves the result by as little: of a matrix of low rank, many eigenvectors are any at all."""
    return not rule.inputs and all(n.op is not Op.EIGH for n in walk(rule.expressions))


EVERY = [name for name in rulec.rules(wrappers=False) if is_determined(rulec.load(name))]
WRAPPERS = [name for name in single() if rulec.load(name).wraps and is_determined(rulec.load(name))]
BEFORE = [name for name in EVERY if name.startswith("transforms/") and rulec.load(name).reads("g")]

any_composition = st.builds(
    Drawn,
    st.lists(st.sampled_from(BEFORE), max_size=2).map(tuple),
    st.lists(st.sampled_from(WRAPPERS), max_size=2, unique=True).map(tuple),
    st.lists(st.sampled_from(BEFORE), max_size=2).map(tuple),
    st.sampled_from([name for name in EVERY if not name.startswith("transforms/")]),
    st.booleans(),
).filter(lambda d: 2 <= len(d.before) + len(d.wrappers) + len(d.inside) + d.decayed <= 3)

#: Why a composition may be refused, in words of its error.
REFUSED = (
    "only one of them may", "a rule sees tensors in one way", "assigns p itself", "has the parameter's shape",
    "bind lr of both to the same", "both choose tensors by rows and cols",
    "skips steps", "both have a hyper-parameter", "has no default", "depend on each other",
    "which gets the other tensors, both keep", "do not all have the same values across the model",
)  # fmt: skip


@given(any_composition, st.integers(0, 1000))
@examples(8)
def test_any_composition_of_the_numpy_backend_steps_as_the_reference_does(composition: Drawn, seed: int) -> None:
    check_against_the_reference("numpy", composition, seed)


@pytest.mark.slow
@given(any_composition, st.integers(0, 1000))
@examples(24)
def test_many_compositions_of_the_numpy_backend_step_as_the_reference_does(composition: Drawn, seed: int) -> None:
    check_against_the_reference("numpy", composition, seed)


@pytest.mark.slow
@given(any_composition, st.integers(0, 1000))
@examples(12)
def test_any_composition_of_the_cpu_backend_steps_as_the_reference_does(composition: Drawn, seed: int) -> None:
    check_against_the_reference("cpu", composition, seed)


def check_against_the_reference(backend: str, composition: Drawn, seed: int) -> None:
    """Steps a composition of any rules of the library over tensors of one to three dimensions, by both."""
    rng = np.random.default_rng(seed)
    params = [rng.normal(size=shape) for shape in ((6, 5), (4,), (2, 5, 4))]
    now = [p.copy() for p in params]
    try:
        rule = composition.composed()
        reference, optimizer = ReferenceOptimizer(rule, params), Optimizer(rule, now, backend=backend)
        reference.copy().step(params)
    except rulec.RuleError as error:
        assume(not any(words in error.message for words in REFUSED))
        raise
    for _ in range(5):
        grads = [rng.normal(size=p.shape) for p in params]
        reference.step(grads)
        optimizer.step(grads)
        for found, wanted in zip(now, reference.params, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-11)
