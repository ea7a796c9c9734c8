"""What an analysis claims holds in numbers, what it denies has a counterexample: every rule, by the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rulec.analysis import Fact, Rest
from tests.analysis.runs import (
    WARM,
    Trial,
    analysed,
    before_and_after,
    far_apart,
    hypers,
    lifted,
    names,
    two_calls,
    watched,
)

NAMES = names()
EXACT, SEEN = 1e-7, 1e-5
STRAIGHT, BENT = 1e-10, 1e-8

rules = pytest.mark.parametrize("text", NAMES)
few = settings(max_examples=3, deadline=None, database=None)
seeds = st.integers(0, 1000)


def refuted(text: str, differs: Callable[[Trial], bool]) -> bool:
    """Whether some of a few trials shows a difference."""
    rule, _ = analysed(text)
    trials = [Trial(rule, hyper, seed, seed == 4) for seed in (3, 4) for hyper in ({}, lifted(rule))]
    return any(map(differs, trials))


def parts(trial: Trial, scales: list[float], least: float) -> bool:
    """Whether `p` goes another way with scaled gradients."""
    return far_apart(trial.path(scales), trial.path([1.0] * len(scales)), trial.params, least)


@rules
@few
@given(seeds, st.integers(-8, 8))
def test_one_scale(text: str, seed: int, power: int) -> None:
    rule, found = analysed(text)
    if found.constant_scale.answer == "yes":
        trial = Trial(rule, hypers(rule, found.constant_scale.where), seed)
        assert not parts(trial, [2.0**power] * 8, EXACT)


@rules
@few
@given(seeds, st.lists(st.integers(-8, 8), min_size=6, max_size=6))
def test_a_scale_for_each_step(text: str, seed: int, powers: list[int]) -> None:
    rule, found = analysed(text)
    if found.changing_scale.answer == "yes":
        trial = Trial(rule, hypers(rule, found.changing_scale.where), seed)
        assert not parts(trial, [2.0**power for power in powers], EXACT)


@rules
def test_scales_that_matter(text: str) -> None:
    _, found = analysed(text)
    one, many = found.constant_scale, found.changing_scale
    if one.answer == "no" or (one.where and all(" = 0" in x for x in one.where)):
        assert refuted(text, lambda trial: parts(trial, [200.0] * 8, SEEN) or parts(trial, [0.01] * 8, SEEN))
    if many.answer == "no":
        assert refuted(text, lambda trial: parts(trial, [4.0, 100.0, 0.01, 10.0, 1.0, 0.1, 50.0, 2.0], SEEN))


def bend(trial: Trial, key: str) -> float:
    """How far a state's new value is from affine in the gradient, in parts of it."""
    warm = [trial.grads(k) for k in range(WARM)]
    one, two = trial.grads(10), trial.grads(11)
    variants = [one, two, [a + b for a, b in zip(one, two, strict=True)], [0 * g for g in one]]
    runs = [before_and_after(trial.after([*warm, g], watched(trial.rule)), key) for g in variants]
    worst = 0.0
    for f1, f2, f12, f0 in zip(*([new for _, new in run] for run in runs), strict=True):
        size = np.max(np.abs([f1, f2, f12, f0]))
        gap = np.max(np.abs(f12 - f1 - f2 + f0))
        worst = max(worst, float(gap / size)) if size and np.isfinite(gap) else worst
    return worst


def bends(key: str, trial: Trial) -> bool:
    return bend(trial, key) > BENT


@rules
@few
@given(seeds)
def test_linear_states(text: str, seed: int) -> None:
    rule, found = analysed(text)
    for key, fact in found.linear.items():
        if fact.answer == "yes":
            assert bend(Trial(rule, {}, seed), key) < STRAIGHT, key


@rules
def test_states_that_are_not_linear(text: str) -> None:
    _, found = analysed(text)
    for key, fact in found.linear.items():
        if fact.answer == "no":
            assert refuted(text, partial(bends, key)), key


@rules
@few
@given(seeds)
def test_accumulation(text: str, seed: int) -> None:
    """The last call is given no gradient at all: only the states can have brought the sum."""
    rule, found = analysed(text)
    if found.accumulates.fact.answer == "yes":
        trial = Trial(rule, {}, seed)
        assert not far_apart(*two_calls(trial), trial.params, 1e-9)


def holds(rest: Rest, old: np.ndarray, new: np.ndarray) -> bool:
    """Whether what is proved of a value is what became of it."""
    if rest.what == "stays":
        return bool(np.allclose(old, new, rtol=1e-12, atol=0))
    if rest.what == "shrinks":
        return bool(np.all((new * old >= 0) & (np.abs(new) <= np.abs(old) * (1 + 1e-12))))
    return bool(np.isnan(new).any())


def at_zero(trial: Trial, key: str, first: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """`p` or a state before and after a step with a gradient of zeros."""
    warm = [] if first else [trial.grads(k) for k in range(WARM)]
    start = trial.after(warm, watched(trial.rule)).params
    run = trial.after([*warm, [0 * g for g in trial.grads(0)]], watched(trial.rule))
    return list(zip(start, run.params, strict=True)) if key == "p" else before_and_after(run, key)


@rules
def test_a_gradient_of_zeros(text: str) -> None:
    rule, found = analysed(text)
    for first, rests in ((True, found.at_zero.first), (False, found.at_zero.later)):
        for key, rest in ((key, rest) for key, cases in rests.items() for rest in cases):
            if rest.what in ("stays", "shrinks", "NaN"):
                trial = Trial(rule, hypers(rule, rest.where), 5)
                pairs = at_zero(trial, key, first)
                test = any if rest.what == "NaN" else all
                assert test(holds(rest, old, new) for old, new in pairs), (key, first, rest)
            elif rest.what == "changes":

                def changes(trial: Trial, key: str = key, first: bool = first) -> bool:
                    return any(not np.allclose(a, b, rtol=1e-9, atol=0) for a, b in at_zero(trial, key, first))

                assert refuted(text, changes), (key, first, rest)


@rules
@few
@given(seeds)
def test_scope(text: str, seed: int) -> None:
    """One element's gradient reaches no other element of an elementwise rule, no other tensor but of a model's."""
    rule, found = analysed(text)
    trial = Trial(rule, {}, seed)
    if found.scope == "model" or not trial.shapes:
        return
    grads = [trial.grads(k) for k in range(4)]
    other = [[g.copy() for g in each] for each in grads]
    for each in other:
        each[0].flat[0] *= -30
    one, two = trial.after(grads).params, trial.after(other).params
    same = [np.equal(a, b) | (np.isnan(a) & np.isnan(b)) for a, b in zip(one, two, strict=True)]
    assert all(s.all() for s in same[1:])
    if found.scope == "elementwise":
        assert same[0].ravel()[1:].all()


@rules
@few
@given(seeds)
def test_rules_that_do_not_read_p_move_alike_everywhere(text: str, seed: int) -> None:
    rule, found = analysed(text)
    if found.reads_parameter:
        return
    trial = Trial(rule, {}, seed)
    grads, shifted = [trial.grads(k) for k in range(4)], [p + 3.0 for p in trial.params]
    one, two = trial.after(grads).params, trial.after(grads, params=shifted).params
    for a, b, p in zip(one, two, trial.params, strict=True):
        np.testing.assert_allclose(b - (p + 3.0), a - p, rtol=1e-6, atol=1e-13)


def test_a_fact_is_true_where_nothing_is_asked_for() -> None:
    assert Fact("yes")
    assert not Fact("yes", where=("eps = 0",))
    assert not Fact("no")
    assert not Fact("unknown")
