"""What an analysis claims holds in numbers, what it denies has a counterexample: every rule, by the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import pytest

import rulec
from rulec.analysis import Fact, Rest
from tests.analysis.runs import WARM, Trial, before_and_after, far_apart, hypers, lifted, names, two_calls
from tests.library import by_kind

EXACT, SEEN = 1e-7, 1e-5
STRAIGHT, BENT = 1e-10, 1e-8

#: Scales of gradients: powers of two, which round nothing, for what is claimed; others for what is denied.
ONE, EACH = [2.0**-7] * 8, [8.0, 2.0**-8, 32.0, 1.0, 0.25, 2.0**8, 0.5, 4.0]
ONES, MANY = ([200.0] * 8, [0.01] * 8), [4.0, 100.0, 0.01, 10.0, 1.0, 0.1, 50.0, 2.0]


class Subject:
    """A rule, its analysis, and the trials that it is held against: one is enough for all claims under a condition."""

    def __init__(self, text: str) -> None:
        rule = rulec.load(text)
        self.rule = rule.bind(keep=3) if rule.sizes and "keep" in rule.sizes.counts else rule
        self.found = self.rule.analysis
        self.plain = Trial(self.rule, {}, 1)
        self._under: dict[tuple[str, ...], Trial] = {}

    def under(self, where: Sequence[str]) -> Trial:
        """The trial whose hyper-parameters meet these conditions."""
        hyper = hypers(self.rule, where)
        return self._under.setdefault(tuple(hyper), Trial(self.rule, hyper, 2)) if hyper else self.plain

    @cached_property
    def doubts(self) -> list[Trial]:
        """Trials of which one shows what is denied: at the defaults, and at values far enough from 0 to be felt."""
        values: list[dict[str, float]] = [{}, lifted(self.rule)]
        drawn = [Trial(self.rule, hyper, seed, seed == 4) for seed in (3, 4) for hyper in values]
        return [*drawn, Trial(self.rule, {}, 5, steady=True)]

    def refuted(self, differs: Callable[[Trial], bool]) -> bool:
        """Whether some trial shows a difference."""
        return any(map(differs, self.doubts))


@pytest.mark.parametrize("text", by_kind(names()))
def test_every_claim_about_a_rule(text: str) -> None:
    subject = Subject(text)
    check_scales(subject)
    check_scales_that_matter(subject)
    check_linear_states(subject)
    check_accumulation(subject)
    check_gradients_of_zeros(subject)
    check_scope(subject)
    check_where_p_is_not_read(subject)


def parts(trial: Trial, scales: list[float], least: float) -> bool:
    """Whether `p` goes another way with scaled gradients."""
    return far_apart(trial.path(scales), trial.straight, trial.params, least)


def check_scales(subject: Subject) -> None:
    for fact, scales in ((subject.found.constant_scale, ONE), (subject.found.changing_scale, EACH)):
        if fact.answer == "yes":
            assert not parts(subject.under(fact.where), scales, EXACT), fact


def check_scales_that_matter(subject: Subject) -> None:
    one, many = subject.found.constant_scale, subject.found.changing_scale
    if one.answer == "no" or (one.where and all(" = 0" in x for x in one.where)):
        assert subject.refuted(lambda trial: any(parts(trial, scales, SEEN) for scales in ONES)), one
    if many.answer == "no":
        assert subject.refuted(lambda trial: parts(trial, MANY, SEEN)), many


def bend(trial: Trial, key: str) -> float:
    """How far a state's new value is from affine in the gradient, in parts of it."""
    runs = [before_and_after(run, key) for run in trial.affine]
    worst = 0.0
    for f1, f2, f12, f0 in zip(*([new for _, new in run] for run in runs), strict=True):
        size = np.max(np.abs([f1, f2, f12, f0]))
        gap = np.max(np.abs(f12 - f1 - f2 + f0))
        worst = max(worst, float(gap / size)) if size and np.isfinite(gap) else worst
    return worst


def check_linear_states(subject: Subject) -> None:
    for key, fact in subject.found.linear.items():
        if fact.answer == "yes":
            assert bend(subject.plain, key) < STRAIGHT, key
        elif fact.answer == "no":
            assert any(bend(trial, key) > BENT for trial in subject.doubts), key


def check_accumulation(subject: Subject) -> None:
    """The last call is given no gradient at all: only the states can have brought the sum."""
    if subject.found.accumulates.fact.answer == "yes":
        assert not far_apart(*two_calls(subject.plain), subject.plain.params, 1e-9)


def holds(rest: Rest, old: np.ndarray, new: np.ndarray) -> bool:
    """Whether what is proved of a value is what became of it."""
    if rest.what == "stays":
        return bool(np.allclose(old, new, rtol=1e-12, atol=0))
    if rest.what == "shrinks":
        return bool(np.all((new * old >= 0) & (np.abs(new) <= np.abs(old) * (1 + 1e-12))))
    return bool(np.isnan(new).any())


def at_zero(trial: Trial, key: str, first: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """`p` or a state before and after a step with a gradient of zeros."""
    start, run = (trial.fresh, trial.without[0]) if first else (trial.warm, trial.without[1])
    return list(zip(start.params, run.params, strict=True)) if key == "p" else before_and_after(run, key)


def changes(trial: Trial, key: str, first: bool) -> bool:
    return any(not np.allclose(a, b, rtol=1e-9, atol=0) for a, b in at_zero(trial, key, first))


def check_gradients_of_zeros(subject: Subject) -> None:
    zero = subject.found.at_zero
    for first, rests in ((True, zero.first), (False, zero.later)):
        for key, rest in ((key, rest) for key, cases in rests.items() for rest in cases):
            if rest.what in ("stays", "shrinks", "NaN"):
                pairs = at_zero(subject.under(rest.where), key, first)
                test = any if rest.what == "NaN" else all
                assert test(holds(rest, old, new) for old, new in pairs), (key, first, rest)
            elif rest.what == "changes":
                assert any(changes(trial, key, first) for trial in subject.doubts), (key, first, rest)


def check_scope(subject: Subject) -> None:
    """One element's gradient reaches no other element of an elementwise rule, no other tensor but of a shared level."""
    trial, scope = subject.plain, subject.found.scope
    if scope in ("group", "model") or not trial.shapes:
        return
    grads = [trial.grads(k) for k in range(4)]
    other = [[g.copy() for g in each] for each in grads]
    for each in other:
        each[0].flat[0] *= -30
    one, two = trial.after(grads).params, trial.after(other).params
    same = [np.equal(a, b) | (np.isnan(a) & np.isnan(b)) for a, b in zip(one, two, strict=True)]
    assert all(s.all() for s in same[1:])
    if scope == "elementwise":
        assert same[0].ravel()[1:].all()


def check_where_p_is_not_read(subject: Subject) -> None:
    """The rule moves p alike, wherever it is."""
    if subject.found.reads_parameter:
        return
    trial = subject.plain
    shifted = [p + 3.0 for p in trial.params]
    moved = trial.after([trial.grads(k) for k in range(WARM + 1)], params=shifted).params
    for a, b, p in zip(trial.straight, moved, trial.params, strict=True):
        np.testing.assert_allclose(b - (p + 3.0), a - p, rtol=1e-6, atol=1e-13)


def test_a_fact_is_true_where_nothing_is_asked_for() -> None:
    assert Fact("yes")
    assert not Fact("yes", where=("eps = 0",))
    assert not Fact("no")
    assert not Fact("unknown")
