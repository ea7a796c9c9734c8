"""Rules written as Python functions: the same as their text, and the same run on arrays undecorated."""

from __future__ import annotations

import copy
import cProfile
import inspect
import pickle
import sys
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rulec
from rulec import Rule
from rulec import math as rm
from rulec.compiler.reference import ReferenceOptimizer
from rulec.language.rule_data import assignments
from rulec.math import clip, sqrt, where
from tests.compiler.plain import PlainRun
from tests.language.test_compose import same_program, same_steps

ADAM = rulec.load("adam")


@rulec.rule(state={"m": 0, "v": 0})
def adam(g, t, s, *, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):  # type: ignore[no-untyped-def]
    """Adaptive moments with bias correction.

    More about it.
    """
    s.m = beta1 * s.m + (1 - beta1) * g
    s.v = beta2 * s.v + (1 - beta2) * g * g
    m_hat = s.m / (1 - beta1**t)
    sigma = sqrt(s.v) / sqrt(1 - beta2**t)
    return m_hat / (sigma + eps)


def test_adam_is_adam() -> None:
    assert adam.step == ADAM.step  # name by name, line by line
    assert adam.step_text() == ADAM.step_text()
    assert adam.hyper == ADAM.hyper
    assert adam.state == ADAM.state
    assert same_program(adam, ADAM)
    assert (adam.name, adam.key, adam.summary) == ("Adam", "adam", "Adaptive moments with bias correction.")
    assert adam.path is not None
    assert adam.path.name == "test_python.py"
    assert rulec.parse(adam.to_yaml()) == adam


@rulec.rule(
    state={"m": 0, "old": "p", "n": {"init": "2*a", "per": "tensor"}}, hyper={"a": {"above": 0, "static": True}}
)
def twice(g, grad, p, t, s, rows, *, a=0.5):  # type: ignore[no-untyped-def]
    """Every argument, a state assigned twice, an old value read after its state was assigned, shared parts."""
    before = s.m
    s.m = a * s.m + g
    s.m = s.m * s.m + before
    s.old = p + before
    drift = (p - s.old) * (p - s.old) + before
    s.n = s.n + rm.sum(drift)
    m = where(drift > 0.5, s.m, -drift)
    return m / t + drift * grad + s.n / rows


TWICE = """
name: Twice
hyper: {a: {default: 0.5, above: 0, static: true}}
state: {m: 0, old: p, n: {init: 2*a, per: tensor}}
step: |
  before = m
  m = a*m + g
  m = m*m + before
  old = p + before
  drift = (p - old)*(p - old) + before
  n = n + sum(drift)
  direction = where(drift > 0.5, m, -drift)/t + drift*grad + n/rows
"""


def test_states_in_order() -> None:
    same_steps(twice, rulec.parse(TWICE))
    assert rulec.parse(twice.to_yaml()) == twice
    assert twice.hyper["a"].static
    assert twice.hyper["a"].limits == {"above": 0}


def test_the_text_of_a_traced_rule() -> None:
    assert twice.step_text().split("\n") == [
        "m_old = m",
        "m = a*m + g",
        "m = m*m + m_old",
        "old = p + m_old",
        "drift = (p - old)*(p - old) + m_old",
        'n = n + sum(drift, per="tensor")',
        "m_ = where(drift > 0.5, m, -drift)",
        "direction = m_/t + drift*grad + n/rows",
    ]


def run_function(rule: Rule, p: Any, grads: list[Any], hyper: dict[str, float], states: dict[str, Any]) -> Any:
    """The undecorated function of a rule on NumPy arrays, one call a step."""
    s = SimpleNamespace(**states)
    wanted = inspect.signature(rule.function).parameters
    for t, g in enumerate(grads, 1):
        given = {"g": g, "grad": g, "p": p, "t": t, "s": s, "rows": p.shape[-2], "cols": p.shape[-1], "numel": p.size}
        result = rule.function(
            **{k: v for k, v in given.items() if k in wanted}, **{k: v for k, v in hyper.items() if k in wanted}
        )
        p = result if rule.assigns_parameter else p - hyper.get("lr", 1e-3) * result
    return p, vars(s)


@rulec.rule(assigns="p", state={"z": "p"})
def averaging(g, p, s, *, lr=0.1, beta1=0.9):  # type: ignore[no-untyped-def]
    s.z = s.z - lr * g
    return beta1 * p + (1 - beta1) * s.z


@rulec.rule
def functions(g, p, *, k=0.3):  # type: ignore[no-untyped-def]
    a = rm.exp(-abs(g)) + rm.log(1 + g * g) + rm.tanh(p) + rm.sigmoid(g) + rm.erf(p) + rm.cbrt(g)
    b = rm.floor(p) % 3 + p // 0.25 + rm.sign(g) + rm.rsqrt(1 + abs(p)) + clip(g, -k, k)
    c = rm.minimum(g, p) * rm.maximum(g, 0.5) + where(rm.logical_and(g > 0, rm.logical_not(p < 0)), a, b)
    d = where(rm.logical_or(g > p, rm.isfinite(g) & ~(p > 1)), +c, -c) + 2**k + (1 - g) ** 2
    e = rm.norm(g) + rm.mean(p, per="row") + rm.rms(g, per="col") + rm.max(g) - rm.min(p, per="matrix")
    return d * e + rm.sum(g, per="row") + rm.count_nonzero(g > 0) / (g != 1) + (g >= p) * (g <= 0) * (g == g)


@pytest.mark.parametrize(
    ("rule", "states"),
    [
        (adam, {"m": 0.0, "v": 0.0}), (twice, {"m": 0.0, "n": 1.0, "old": None}), (averaging, {"z": None}),
        (functions, {}),
    ],
    ids=lambda x: x.name if isinstance(x, Rule) else "",
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_function_on_arrays(rule: Rule, states: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    p = rng.normal(size=(3, 4))
    grads = [rng.normal(size=(3, 4)) for _ in range(4)]
    hyper = {"lr": 1e-3, **{k: float(h.default) for k, h in rule.hyper.items()}}  # type: ignore[arg-type]
    found, after = run_function(rule, p, grads, hyper, {k: p if v is None else v for k, v in states.items()})
    reference = ReferenceOptimizer(rule, [p])
    for g in grads:
        reference.step([g])
    np.testing.assert_allclose(reference.params[0], found, rtol=1e-12)
    for key, value in reference.state(0).items():
        np.testing.assert_allclose(value.reshape(np.shape(after[key])), after[key], rtol=1e-12)


def test_names_of_locals() -> None:
    @rulec.rule(state={"m": 0, "m_old": 0})
    def rule(g, p, s, *, beta=0.5):  # type: ignore[no-untyped-def]
        direction = g * 2  # a name with a meaning
        g = direction + p  # the argument's own name
        β = g * beta  # no name of the language
        m_old = s.m  # a state's name
        s.m_old = s.m_old + β * direction
        s.m = β + s.m_old
        lr = β * β + m_old
        return lr + s.m

    assert rule.step_text().split("\n") == [
        "direction_ = g*2",
        "g_ = direction_ + p",
        "beta_ = g_*beta",
        "m_old = m_old + beta_*direction_",
        "m_old_ = m",
        "m = beta_ + m_old",
        "lr_ = beta_*beta_ + m_old_",
        "direction = lr_ + m",
    ]
    assert rulec.parse(rule.to_yaml()) == rule


def test_one_value_under_two_names_and_a_state() -> None:
    @rulec.rule(state={"prev": 0})
    def rule(g, s):  # type: ignore[no-untyped-def]
        d = g - s.prev
        e = d
        s.prev = d
        return e

    assert rule.step_text() == "prev = g - prev\ndirection = prev"


def test_a_leaf_is_called_by_its_own_name() -> None:
    @rulec.rule(state={"prev": 0, "rate": {"init": 0, "per": "tensor"}})
    def rule(g, s, *, k=1.0):  # type: ignore[no-untyped-def]
        d = g - s.prev
        s.prev = g
        s.rate = k
        return d + g * k + 0 * s.rate

    assert rule.step_text().split("\n") == [
        "prev_old = prev",
        "prev = g",
        "rate = k",
        "d = g - prev_old",
        "direction = d + g*k + 0*rate",
    ]


def test_a_state_assigned_again_no_longer_names_its_value() -> None:
    @rulec.rule(state={"m": 0})
    def rule(g, p, s):  # type: ignore[no-untyped-def]
        first = s.m + g
        s.m = first
        s.m = s.m * p
        return first * s.m

    g, p = np.full((1, 1, 2), 3.0), np.full((1, 1, 2), 5.0)
    run = PlainRun(rule, p, {})
    assert (run.step(g)["direction"] == 3 * 15).all()
    assert (run.step(g)["direction"] == 18 * 90).all()


def test_helpers_and_loops() -> None:
    def powers(x: Any, n: int) -> Any:
        for _ in range(n):
            x = x * x + 1
        return x

    @rulec.rule
    def rule(g):  # type: ignore[no-untyped-def]
        return powers(g, 40) / powers(g, 41) + powers(g, 3)

    assert len(rule.to_yaml()) < 10_000
    assert rulec.parse(rule.to_yaml()) == rule
    g = np.full((1, 1, 1), 0.5)
    with np.errstate(all="ignore"):
        assert np.isnan(PlainRun(rule, g, {}).step(g)["direction"])
        assert powers(0.5, 3) == PlainRun(rulec.rule(lambda g: powers(g, 3)), g, {}).step(g)["direction"]


def test_deep_expressions_get_lines() -> None:
    @rulec.rule
    def rule(g):  # type: ignore[no-untyped-def]
        total = g
        for i in range(700):
            total = total * 0.5 + i
        return total

    assert rulec.parse(rule.to_yaml()) == rule
    rulec.compile(rule)


def test_calling_a_rule() -> None:
    decay = rulec.load("decay")

    @rulec.rule
    def rule(g):  # type: ignore[no-untyped-def]
        return ADAM(2 * g) + decay(g)

    text = "name: R\nuses: [adam, decay]\nstep: |\n  direction = adam(2*g) + decay(g)\n"
    assert same_program(rule, rulec.parse(text))
    assert list(rule.state) == ["adam.m", "adam.v"]
    assert rulec.parse(rule.to_yaml()) == rule


def test_calling_a_rule_that_assigns_its_locals_again() -> None:
    inner = rulec.parse(
        "name: Inner\nhyper: {k: 2}\nstate: {m: 0, n: 0}\nstep: |\n  d = abs(g)\n  m = sqrt(d)\n  d = d*k\n"
        "  n = sqrt(d) + m\n  d = d + n\n  direction = sqrt(d)\n"
    )

    @rulec.rule(state={"n": 1})
    def rule(g, s):  # type: ignore[no-untyped-def]
        s.n = 0.5 * s.n + g
        found = inner(s.n * 3)
        return found + s.n

    rng = np.random.default_rng(0)
    p = rng.normal(size=(1, 2, 2))
    alone, called, outer = PlainRun(inner, p, {"k": 2}), PlainRun(rule, p, {"k": 2}), np.ones((1, 2, 2))
    for _ in range(3):
        g = rng.normal(size=(1, 2, 2))
        outer = 0.5 * outer + g
        np.testing.assert_allclose(called.step(g)["direction"], alone.step(outer * 3)["direction"] + outer, rtol=1e-14)
        np.testing.assert_allclose(called.states["inner.m"], alone.states["m"], rtol=1e-14)
    assert rulec.parse(rule.to_yaml()) == rule


def test_calling_a_rule_twice_makes_two_of_it() -> None:
    @rulec.rule
    def rule(g):  # type: ignore[no-untyped-def]
        return ADAM(g) + ADAM(ADAM(g))

    assert list(rule.state) == ["adam.m", "adam.v", "adam2.m", "adam2.v", "adam3.m", "adam3.v"]
    assert rulec.parse(rule.to_yaml()) == rule


def test_calling_a_rule_bound_to_the_learning_rate() -> None:
    cut = rulec.load("clip_by_value").bind(bound="2*lr")

    @rulec.rule
    def alone(g):  # type: ignore[no-untyped-def]
        return cut(g)

    @rulec.rule
    def within(g, *, lr=0.1):  # type: ignore[no-untyped-def]
        return 3 * cut(g)

    for rule in (alone, within):
        assert rulec.parse(rule.to_yaml()) == rule
    same_steps(alone, rulec.load("clip_by_value").bind(bound=2e-3))


def test_options() -> None:
    made = rulec.rule(name="Other", paper={"title": "T", "year": 2000})(lambda g: g)
    assert (made.name, made.paper, made.summary) == ("Other", {"title": "T", "year": 2000}, "")
    assert rulec.parse(made.to_yaml()) == made
    assert made.function(3) == 3


def test_plain_numbers_of_any_kind() -> None:
    @rulec.rule
    def rule(g):  # type: ignore[no-untyped-def]
        return np.float64(2) * g + np.float32(0.5) + Fraction(1, 4) * g - np.int64(3) ** g + 2 // g

    assert rule.step_text() == "direction = 2*g + 0.5 + 0.25*g - 3**g + 2//g"


def test_constants_alone() -> None:
    assert rulec.rule(lambda: 1.5).step_text() == "direction = 1.5"


@given(st.lists(st.tuples(st.sampled_from(["m", "v"]), st.integers(0, 4), st.integers(0, 4)), max_size=6), st.data())
@settings(max_examples=100, deadline=None)
def test_random_programs(moves: list[tuple[str, int, int]], data: Any) -> None:
    """States read and assigned in any order, values kept in between: the lines mean what the function computes."""

    def function(g: Any, s: Any) -> Any:
        kept = [g, s.m, s.v, s.m + g, s.v * 0.5]
        for state, i, j in moves:
            setattr(s, state, kept[i % len(kept)] * 0.5 + kept[-1 - j % len(kept)])
            kept += [getattr(s, state), getattr(s, state) - kept[j % len(kept)], s.m]
        return kept[first % len(kept)] + kept[second % len(kept)] + s.m * s.v

    first, second = data.draw(st.integers(0, 30)), data.draw(st.integers(0, 30))
    rule = rulec.rule(state={"m": 1, "v": 2})(function)
    assert rulec.parse(rule.to_yaml()) == rule
    rng = np.random.default_rng(0)
    run, s = PlainRun(rule, np.ones((1, 1, 3)), {}), SimpleNamespace(m=1.0, v=2.0)
    for _ in range(3):
        g = rng.normal(size=(1, 1, 3))
        np.testing.assert_allclose(run.step(g)["direction"], function(g, s), rtol=1e-12, atol=1e-12)


def test_matrix_functions_and_random_numbers() -> None:
    @rulec.rule(state={"m": 0})
    def rule(g, p, t, s, rows, cols, *, k=0.95):  # type: ignore[no-untyped-def]
        s.m = k * s.m + g
        gram = rm.matmul(g, rm.transpose(g)) + rm.norm(g) * (rm.qr(g) @ rm.transpose(rm.qr(g)))
        noise = rm.normal([rows, cols], at=t, draw=0) + rm.uniform([rows, cols], at=rm.floor(t / 2), draw=1)
        basis = rm.eigh(gram)
        return rm.newton_schulz(s.m, steps=5) + rm.inverse_root(gram, 2) @ g + basis @ (rm.transpose(basis) @ noise)

    text = """
name: Rule
hyper: {k: 0.95}
state: {m: 0}
step: |
  m = k*m + g
  gram = g @ transpose(g) + norm(g)*(qr(g) @ transpose(qr(g)))
  noise = normal([rows, cols]) + uniform([rows, cols], at=floor(t/2))
  basis = eigh(gram)
  direction = newton_schulz(m) + inverse_root(gram, 2) @ g + basis @ (transpose(basis) @ noise)
"""
    assert set(rule.step) == set(rulec.parse(text).step)  # a local is written where it is first needed
    rng = np.random.default_rng(0)
    p = rng.normal(size=(3, 3))
    grads = [rng.normal(size=(3, 3)) for _ in range(3)]
    found, _ = run_function(rule, p, grads, {"k": 0.95}, {"m": 0.0})
    reference = ReferenceOptimizer(rule, [p])
    for g in grads:
        reference.step([g])
    np.testing.assert_allclose(reference.params[0], found, rtol=1e-8)


def test_draws_of_a_python_rule_are_apart() -> None:
    @rulec.rule
    def rule(g, t, rows, cols):  # type: ignore[no-untyped-def]
        return g + rm.normal([rows, cols], at=t) + rm.normal([rows, cols], at=t) + rm.uniform((rows, 4), at=t, draw=7)

    assert [text in rule.step_text() for text in ("draw=0", "draw=1", "draw=7")] == [True] * 3
    assert rulec.parse(rule.to_yaml()) == rule


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("per", ["row", "col", "matrix", "tensor"])
def test_reductions_of_arrays_of_any_shape(shape: tuple[int, ...], per: str) -> None:
    """A vector is one row, on arrays as in a rule."""
    x = np.random.default_rng(0).normal(size=shape)
    rule = rulec.parse(
        f'name: R\nstep: |\n  p = 0*p + sum(g, per="{per}") + norm(g, per="{per}") + max(g, per="{per}")\n'
    )
    reference = ReferenceOptimizer(rule, [x])
    reference.step([x])
    found = rm.sum(x, per=per) + rm.norm(x, per=per) + rm.max(x, per=per)
    np.testing.assert_allclose(np.broadcast_to(found, shape), reference.params[0], rtol=1e-13)


def test_copies_and_pickles() -> None:
    assert copy.deepcopy(adam) is adam
    assert copy.copy(adam) == adam
    hash(adam)
    for rule in (adam, twice, ADAM, ADAM + rulec.load("decay")):
        again = pickle.loads(pickle.dumps(rule))  # noqa: S301 - made here
        assert again == rule
        assert again.function is None
        # Nodes are the same objects wherever they come from.
        assert [line.value for line in assignments(again.step)] == [line.value for line in assignments(rule.step)]


def test_a_rule_in_a_few_words() -> None:
    assert repr(adam) == "<Rule Adam(lr=0.001, beta1=0.9, beta2=0.999, eps=1e-08), state m, v>"
    assert repr(rulec.load("transforms/sign")) == "<Rule Sign()>"


def test_names_of_many_joined_rules() -> None:
    total = adam
    for _ in range(12):
        total = total + adam
    assert len(total.name) <= 100
    assert rulec.parse(total.to_yaml()) == total


@pytest.mark.parametrize("title", [" ", 'a"b', "a\\b", "a\nb", "a\x00", "\u2028", "x" * 101])
def test_names_that_generated_code_cannot_quote(title: str) -> None:
    with pytest.raises(rulec.RuleError, match=r": the name .* of a rule "):
        rulec.rule(name=title)(lambda g: g)


BRANCHING = """
name: Branching
hyper: {warm: 3, rate: 0.5}
state: {m: 0, n: {init: 0, per: tensor}}
step: |
  scale = 1
  if t <= warm:
    m = m + g
    scale = t/warm
    if norm(m) > 1:
      n = n + 1
  else:
    old = m
    m = rate*m + (1 - rate)*g
    scale = scale + sum(old - m)
  direction = scale*m + n
"""


def test_a_called_rule_may_branch() -> None:
    called = rulec.parse(BRANCHING)

    @rulec.rule
    def calling(g: Any, *, lr: float = 0.1) -> Any:
        """Calls a rule that branches."""
        d = called(2 * g)
        return d + g

    step = "step: |\n  d = branching(2*g)\n  direction = d + g\n"
    text = f"name: Calling\nhyper: {{lr: 0.1}}\nuses: {{branching: branching.yaml}}\n{step}"
    from rulec.language.yaml.read import parse_rule

    written = parse_rule(text, "calling.yaml", lambda _: called)
    assert list(calling.state) == list(written.state) == ["branching.m", "branching.n"]
    assert rulec.parse(calling.to_yaml()) == calling
    same_steps(calling.bind(warm=2), written.bind(warm=2))


def test_a_called_rule_may_see_tensors_as_other_matrices() -> None:
    centralize, short = (
        rulec.load("centralize"),
        rulec.parse("name: S\nview: {short: first}\nstep: |\n  direction = g\n"),
    )

    @rulec.rule
    def calling(g: Any) -> Any:
        """Calls a rule with a view."""
        return centralize(g)

    assert calling.view == centralize.view == {"flatten": "rest"}
    with pytest.raises(rulec.RuleError, match="S sees tensors as other matrices than the rule called before it"):
        rulec.rule(lambda g: short(centralize(g)))
    both = rulec.parse(
        "name: C\nstate: {m: {init: 0, if: ndim > 1}}\nstep: |\n  direction = g\n  if ndim > 1:\n    m = m + 1\n"
    )
    # A called rule keeps its branches, and so its states for some shapes.
    assert rulec.rule(lambda g: both(g)).step_text() == ("if ndim > 1:\n  c.m = c.m + 1\ndirection = g")


def test_a_rule_is_traced_under_a_profiler() -> None:
    """The names of locals are taken from the function's frame: a user's profiler, of either kind, stays as it was."""

    def traced() -> rulec.Rule:
        @rulec.rule(state={"m": 0})
        def f(g: Any, s: Any, *, lr: float = 1e-3) -> Any:
            s.m = 0.9 * s.m + 0.1 * g
            half = s.m / 2
            return half * sqrt(half)

        return f

    def seen(*_: Any) -> None: ...

    plain = traced().to_yaml()
    profile = cProfile.Profile()
    profile.enable()
    try:
        profiled, during = traced().to_yaml(), sys.getprofile()
    finally:
        profile.disable()
    assert profiled == plain
    assert "half = m/2" in plain
    assert profile.getstats()
    assert during is None or isinstance(during, cProfile.Profile)
    sys.setprofile(seen)
    try:
        assert traced().to_yaml() == plain
        assert sys.getprofile() is seen
    finally:
        sys.setprofile(None)
