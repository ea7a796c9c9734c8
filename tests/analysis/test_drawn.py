"""Proofs about rules that nobody wrote: what is claimed of random ones holds in numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rulec import Rule
from rulec.analysis.accumulate import accumulating, accumulation
from rulec.analysis.flow import Fact, flow_of
from rulec.analysis.linear import LinearForms
from rulec.analysis.scale import changing_scale, constant_scale
from rulec.analysis.zero import at_zero
from rulec.language.expr.node import Node, Op, const, name, node
from rulec.language.hyper import Hyper
from rulec.language.rule_data import Assign, Branch, State, Statement
from tests.analysis.runs import Array, Trial, before_and_after, far_apart, hypers, watched

STATES = {"m": State(const(0)), "v": State(const(0)), "w": State(name("p")), "n": State(const(0), per="tensor")}
HYPER = {"lr": Hyper(0.1, min=0), "eps": Hyper(0.2, min=0), "b": Hyper(0.5, min=0, below=1), "d": Hyper(0.3, above=0)}
WARM = 3

seeds = st.integers(0, 99)
few = settings(max_examples=12, deadline=None)


def many(test: Callable[..., None]) -> Callable[..., None]:
    """For the slow run."""
    return pytest.mark.slow(settings(max_examples=150, deadline=None)(test))


leaves = st.sampled_from(["g", "g", "m", "v", "n", "w", "p", "eps", "b", "d", "t"]).map(name)
numbers = st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0, 3.0]).map(const)

#: What keeps a power of a scale, and what does not.
_KEEPING, _LOSING = (Op.ABS, Op.SIGN, Op.NEG), (Op.ISFINITE, Op.TANH, Op.LOG, Op.RSQRT)


def _larger(inner: st.SearchStrategy[Node], unary: Sequence[Op]) -> st.SearchStrategy[Node]:
    binary = [Op.ADD, Op.SUB, Op.MUL, Op.MUL, Op.DIV, Op.DIV, Op.MINIMUM, Op.MAXIMUM]
    truth = st.builds(node, st.sampled_from([Op.GT, Op.LE, Op.EQ]), inner, inner)
    return st.one_of(
        st.builds(node, st.sampled_from(binary), inner, inner),
        st.builds(node, st.sampled_from(unary), inner),
        st.builds(lambda x: node(Op.SQRT, node(Op.ABS, x)), inner),
        st.builds(lambda x, k: node(Op.POW, x, const(k)), inner, st.sampled_from([2.0, 3.0, 1.0, -1.0])),
        st.builds(lambda c, a, b: node(Op.WHERE, c, a, b), truth, inner, inner),
        st.builds(_guarded, inner, inner, inner, st.sampled_from(["tensor", "row"])),
        st.builds(_mean, st.sampled_from(["b", "eps"]).map(name), inner, inner),
        st.builds(node, st.sampled_from([Op.SUM, Op.NORM, Op.MEAN, Op.MAX]), inner, st.sampled_from(["tensor", "row"])),
    )


def _guarded(x: Node, size: Node, instead: Node, level: str) -> Node:
    norm = node(Op.NORM, size, level)
    return node(Op.DIV, x, node(Op.WHERE, node(Op.GT, norm, const(0)), norm, instead))


def _mean(weight: Node, x: Node, y: Node) -> Node:
    return node(Op.ADD, node(Op.MUL, weight, x), node(Op.MUL, node(Op.SUB, const(1), weight), y))


values = st.recursive(leaves | leaves | numbers, lambda inner: _larger(inner, _KEEPING + _LOSING), max_leaves=6)
powers = st.recursive(
    st.sampled_from(["g", "g", "m", "v", "n", "eps", "b"]).map(name), lambda x: _larger(x, _KEEPING), max_leaves=4
)


def _rule(draw: Any, values: st.SearchStrategy[Node], end: Node) -> Rule:
    step = _lines(draw, values, end)
    if draw(st.booleans()):
        other = _lines(draw, values, draw(st.sampled_from([end, node(Op.NEG, end)])))
        step = (Branch(node(Op.GT, name("t"), const(draw(st.sampled_from([1.0, 3.0])))), step, other),)
    return Rule("Drawn", step, HYPER, STATES)


def _lines(draw: Any, values: st.SearchStrategy[Node], end: Node) -> tuple[Statement, ...]:
    targets = draw(st.lists(st.sampled_from(list(STATES)), max_size=3, unique=True))
    lines = [Assign(key, node(Op.MEAN, draw(values), "tensor") if key == "n" else draw(values)) for key in targets]
    return (*lines, Assign("direction", end))


@st.composite
def drawn_rules(draw: Any) -> Rule:
    """A rule of up to four lines over states of two levels."""
    return _rule(draw, values, draw(values))


@st.composite
def unscaled_rules(draw: Any) -> Rule:
    """A rule that ends in a sign or in parts of a norm: the scale of what it is made of is gone."""
    end = draw(powers)
    whole = draw(st.sampled_from([node(Op.NORM, end, "tensor"), node(Op.ABS, end), None]))
    return _rule(draw, powers, node(Op.SIGN, end) if whole is None else node(Op.DIV, end, whole))


def ordinary(arrays: Sequence[Array]) -> bool:
    """Whether numbers are of sizes at which rounding is all that floating point does to them."""
    sizes = [np.abs(a[a != 0]) for a in map(np.asarray, arrays)]
    return all(np.isfinite(a).all() for a in arrays) and all(((s > 1e-9) & (s < 1e9)).all() for s in sizes)


@few
@given(unscaled_rules(), seeds)
def test_scales(rule: Rule, seed: int) -> None:
    check_scales(rule, seed)


@many
@given(unscaled_rules(), seeds)
def test_scales_of_many(rule: Rule, seed: int) -> None:
    check_scales(rule, seed)


def check_scales(rule: Rule, seed: int) -> None:
    flow = flow_of(rule)
    claims: list[tuple[Fact, list[float]]] = [
        (constant_scale(flow), [64.0] * 4), (changing_scale(flow), [64.0, 1.0, 64.0**-2, 64.0]),
    ]  # fmt: skip
    for fact, scales in claims:
        if fact.answer == "yes":
            trial = Trial(rule, hypers(rule, fact.where), seed)
            plain, scaled = trial.path([1.0] * 4), trial.path(scales)
            if ordinary(plain):
                assert not far_apart(scaled, plain, trial.params, 1e-9)


@few
@given(drawn_rules(), seeds)
def test_linear_states_and_accumulation(rule: Rule, seed: int) -> None:
    check_linear_states_and_accumulation(rule, seed)


@many
@given(drawn_rules(), seeds)
def test_linear_states_and_accumulation_of_many(rule: Rule, seed: int) -> None:
    check_linear_states_and_accumulation(rule, seed)


def check_linear_states_and_accumulation(rule: Rule, seed: int) -> None:
    flow, forms, trial = flow_of(rule), LinearForms(), Trial(rule, {}, seed)
    warm, one, two = [trial.grads(k) for k in range(WARM)], trial.grads(7), trial.grads(8)
    both = [a + b for a, b in zip(one, two, strict=True)]
    linear = [key for key in STATES if forms.form(flow.new[key]).broken is None]
    run = trial.after(warm, watched(rule))
    ends = [trial.further(run, g, WARM) for g in (one, two, both, [0 * g for g in one])]
    for key in linear:
        pairs = [before_and_after(run, key) for run in ends]
        for (_, f1), (_, f2), (_, f12), (_, f0) in zip(*pairs, strict=True):
            if ordinary([f1, f2, f12, f0]):
                np.testing.assert_allclose(f12 + f0, f1 + f2, rtol=1e-9, atol=1e-9 * np.max(np.abs([f1, f2, f12, f0])))
    found = accumulation(flow, forms)
    if found:
        run = trial.optimizer(accumulating(flow, found.adds))
        for k, grads in enumerate(warm):
            trial.step(run, grads, k, phase=0, step=k + 1)
            trial.step(run, [0 * g for g in grads], k, phase=2, step=k + 1)
        for grads, phase in ((one, 0), (two, 1), ([0 * g for g in one], 2)):
            trial.step(run, grads, WARM, phase=phase, step=WARM + 1)
        if ordinary(ends[2].params):
            assert not far_apart(run.params, ends[2].params, trial.params, 1e-7)


@few
@given(drawn_rules(), seeds)
def test_gradients_of_zero(rule: Rule, seed: int) -> None:
    check_gradients_of_zero(rule, seed)


@many
@given(drawn_rules(), seeds)
def test_gradients_of_zero_of_many(rule: Rule, seed: int) -> None:
    check_gradients_of_zero(rule, seed)


def check_gradients_of_zero(rule: Rule, seed: int) -> None:
    found = at_zero(flow_of(rule), lambda key, first: True)
    for rests, count in ((found.first, 0), (found.later, WARM)):
        check_at_zero(rule, rests, count, seed)


def check_at_zero(rule: Rule, rests: Mapping[str, Any], count: int, seed: int) -> None:
    """Every proof about a step with a gradient of zeros after so many others."""
    for key, rest in ((key, rest) for key, cases in rests.items() for rest in cases if rest.what != "changes"):
        trial = Trial(rule, hypers(rule, rest.where), seed)
        warm = [trial.grads(k) for k in range(count)]
        start = trial.after(warm, watched(rule))
        run = trial.further(start, [0 * g for g in trial.grads(0)], count)
        before = [old for k in STATES for old, _ in before_and_after(run, k)]
        if not all(np.isfinite(x).all() for x in (*before, *start.params)):
            continue
        pairs = list(zip(start.params, run.params, strict=True)) if key == "p" else before_and_after(run, key)
        for old, new in pairs:
            if rest.what == "NaN":
                assert np.isnan(new).all(), (key, count, rest)
            elif rest.what == "stays":
                np.testing.assert_allclose(new, old, rtol=1e-12, err_msg=f"{key} {count} {rest}")
            else:
                assert np.all((new * old >= 0) & (np.abs(new) <= np.abs(old) * (1 + 1e-12))), (key, count, rest)
