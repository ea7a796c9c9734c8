"""Every key of a rule file in Python: rules of the library, written as functions, are equal to their files."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rulec
from rulec import Rule, RuleError
from rulec.compiler.reference import ReferenceOptimizer
from rulec.math import cond, floor, maximum, minimum, newton_schulz, norm, normal, sqrt, transpose, where
from rulec.math import sum as total_of

ADAMW = rulec.load("adamw")


def assert_equal(rule: Rule, twin: str | Rule) -> None:
    """The same file, but for its summary and what the rule is called elsewhere; and the same program."""
    other = rulec.load(twin) if isinstance(twin, str) else twin
    one, two = (replace(each, summary="", paper={}, interop={}) for each in (rule, other))
    assert one.to_yaml() == two.to_yaml()
    assert rulec.parse(one.to_yaml()) == one
    if not one.wraps:
        assert rulec.compile(one).stages == rulec.compile(two).stages


def test_if_computes_the_arm_it_takes() -> None:
    ranges = {"lambda_abs": {"above": 0}, "lambda_rel": {"above": 0}, "warmup": {"min": 0}}

    @rulec.rule(name="AdaGC", state={"gamma": {"per": "tensor"}}, hyper=ranges)
    def adagc(g: Any, t: Any, s: Any, *, lambda_abs: Any = 1, lambda_rel: Any = 1.05, beta: Any = 0.98,
              warmup: Any = 100, eps: Any = 1e-8) -> Any:  # fmt: skip
        n = norm(g, per="model")

        def early() -> Any:
            h = minimum(1, lambda_abs / (n + eps)) * g
            s.gamma = where(t == 1, norm(h), minimum(s.gamma, norm(h)))
            return h

        def late() -> Any:
            h = minimum(1, lambda_rel * maximum(s.gamma, eps) / maximum(norm(g), eps)) * g
            s.gamma = beta * s.gamma + (1 - beta) * norm(h)
            return h

        h = cond((t == 1) | (t < warmup), early, late)
        return ADAMW(h)

    twin = rulec.load("adagc")
    assert adagc.step == twin.step
    assert adagc.state == twin.state
    assert {**adagc.hyper} == {**twin.hyper}


FORKS = """
name: Forks
hyper: {k: {default: 2, min: 1}}
state: {m: 0, v: 0, n: {init: 0, per: tensor, if: ndim >= 2}}
step: |
  before = m
  twice = 2*g
  if t % k == 0:
    m_old = m
    m = m + twice
    if t > 4:
      x = m + m_old
      v = v + 1
    else:
      x = m - m_old
    a = x*m
    b = m_old
  else:
    a = g
    b = v
  if not ndim < 2:
    n = n + 1
  direction = a + b*before + m + v
"""


@rulec.rule(state={"m": 0, "v": 0, "n": {"per": "tensor", "if": "ndim >= 2"}}, hyper={"k": {"min": 1}})
def forks(g: Any, t: Any, s: Any, ndim: Any, *, k: Any = 2) -> Any:
    """Arms with arms, old values read on every level, an arm without lines, and a state for some shapes."""
    before = s.m
    twice = 2 * g

    def then() -> Any:
        old = s.m
        s.m = s.m + twice

        def late() -> Any:
            s.v = s.v + 1
            return s.m + old

        x = cond(t > 4, late, lambda: s.m - old)
        return x * s.m, old

    def count() -> None:
        s.n = s.n + 1

    a, b = cond(t % k == 0, then, lambda: (g, s.v))
    cond(ndim < 2, lambda: None, count)
    return a + b * before + s.m + s.v


def test_arms_within_arms_run_as_their_text() -> None:
    twin = rulec.parse(FORKS)
    assert rulec.parse(forks.to_yaml()) == replace(forks, summary=forks.summary)
    for shape in ((3,), (2, 3)):
        params = np.linspace(-1, 1, int(np.prod(shape))).reshape(shape)
        one, two = (ReferenceOptimizer(rule, [params.copy()]) for rule in (forks, twin))
        for step in range(7):
            for each in (one, two):
                each.step([np.cos(params + step)])
            np.testing.assert_array_equal(one.params[0], two.params[0])
            for key in ("m", "v", *(["n"] if len(shape) > 1 else [])):
                np.testing.assert_array_equal(one.state(0)[key], two.state(0)[key])


def test_the_function_runs_on_arrays_and_takes_one_arm() -> None:
    calls = []

    def function(g: Any, t: Any) -> Any:
        return cond(t == 1, lambda: calls.append("then") or g, lambda: calls.append("otherwise") or -g)

    assert function(2.0, 1) == 2
    assert function(2.0, np.array([5])) == -2
    assert calls == ["then", "otherwise"]
    with pytest.raises(RuleError, match="cond has one condition, not 3: use where for each element"):
        function(2.0, np.zeros(3))


def test_a_called_rule_keeps_its_branches() -> None:
    inner = rulec.parse(
        "name: Inner\nhyper: {k: 2}\nstate: {m: 0}\nstep: |\n  n = norm(g)\n  if t > k:\n    m = m + g/n\n    d = m\n"
        "  else:\n    d = g\n  direction = d*n\n"
    )
    called = rulec.rule(name="Outer")(lambda g: inner(2 * g))
    assert called.step_text() == (
        'inner.g = 2*g\ninner.n = norm(inner.g, per="tensor")\nif t > k:\n  inner.m = inner.m + inner.g/inner.n\n'
        "  inner.d = inner.m\nelse:\n  inner.d = inner.g\ninner.direction = inner.d*inner.n\n"
        "direction = inner.direction"
    )


def test_inputs() -> None:
    @rulec.rule(name="PolyakSGD", inputs={"loss": "scalar"}, hyper={"max_lr": {"min": 0}}, statistics={
        "rate": "where(n + eps <= machine_eps, 0, minimum((loss - f_min)/(n + eps), max_lr))",
    })  # fmt: skip
    def polyak(g: Any, loss: Any, machine_eps: Any, *, lr: Any = 1.0, max_lr: Any = 1.0, f_min: Any = 0,
               eps: Any = 0) -> Any:  # fmt: skip
        n = total_of(g * g, per="model")
        return g * where(n + eps <= machine_eps, 0, minimum((loss - f_min) / (n + eps), max_lr))

    assert_equal(polyak, "polyak_sgd")


MUON_RANGES = {
    "lr": {"min": 0}, "momentum": {"min": 0}, "weight_decay": {"min": 0},
    "ns_steps": {"static": True, "whole": True, "min": 1, "below": 100},
}  # fmt: skip


@pytest.mark.parametrize("otherwise", ["adamw(lr=adamw_lr, eps=adamw_eps)", ADAMW])
def test_applies_to_and_otherwise(otherwise: Any) -> None:
    @rulec.rule(
        name="Muon", state={"m": 0}, hyper=MUON_RANGES, otherwise=otherwise, view={"flatten": "rest"},
        applies_to='(ndim == 2 or (ndim > 2 and tagged("kernel"))) and not (tagged("embedding") or tagged("head") or '
        'tagged("vector"))',
    )  # fmt: skip
    def muon(g: Any, p: Any, s: Any, rows: Any, cols: Any, *, lr: Any = 1e-3, momentum: Any = 0.95,
             weight_decay: Any = 0.1, ns_steps: Any = 5) -> Any:  # fmt: skip
        s.m = momentum * s.m + (1 - momentum) * g
        o = newton_schulz((1 - momentum) * g + momentum * s.m, steps=ns_steps, dtype="bfloat16")
        return sqrt(maximum(1, rows / cols)) * o + weight_decay * p

    if otherwise is not ADAMW:
        assert_equal(muon, "muon")
    else:
        assert muon.rest is not None
        assert muon.rest.step == ADAMW.step


def test_view_rate_skip_and_shape() -> None:
    text = """
name: Whole
hyper: {own_lr: 0.1, rank: {default: 1, static: true, whole: true, min: 1}}
inputs: {curvature: like p}
state: {m: {init: 0, shape: [rank, cols]}, n: 0}
view: {flatten: rest, short: first}
rate: 2*own_lr
skip: sum(g) > 3
step: |
  m = m + g[:rank]
  n = n + curvature
  direction = n + sum(m)
"""

    @rulec.rule(
        inputs={"curvature": "like p"}, view={"flatten": "rest", "short": "first"}, rate="2*own_lr", skip="sum(g) > 3",
        state={"m": {"shape": ["rank", "cols"]}, "n": 0}, hyper={"rank": {"static": True, "whole": True, "min": 1}},
    )  # fmt: skip
    def whole(g: Any, s: Any, curvature: Any, *, own_lr: Any = 0.1, rank: Any = 1) -> Any:
        s.m = s.m + g[:rank]
        s.n = s.n + curvature
        return s.n + total_of(s.m)

    assert_equal(whole, rulec.parse(text))


def test_evaluate() -> None:
    ranges = {"momentum": {"above": 0, "below": 1}, **{k: {"min": 0} for k in ("warmup_steps", "r", "weight_lr_power")}}

    @rulec.rule(
        name="ScheduleFreeSGD", assigns="p", hyper=ranges, evaluate="p + (1 - 1/momentum)*(z - p)",
        state={"z": "p", "lr_max": {"per": "group"}, "weight_sum": {"per": "group"}},
    )  # fmt: skip
    def free(g: Any, p: Any, t: Any, s: Any, *, lr: Any = 1, momentum: Any = 0.9, weight_decay: Any = 0,
             warmup_steps: Any = 0, r: Any = 0, weight_lr_power: Any = 2) -> Any:  # fmt: skip
        gamma = lr * minimum(1, t / maximum(warmup_steps, 1))
        s.lr_max = maximum(s.lr_max, gamma)
        w = t**r * s.lr_max**weight_lr_power
        s.weight_sum = s.weight_sum + w
        c = where(s.weight_sum > 0, w / s.weight_sum, 0)
        d = g + weight_decay * p
        new = (1 - c) * p + c * s.z + gamma * (momentum * (1 - c) - 1) * d
        s.z = s.z - gamma * d
        return new

    twin = rulec.load("schedule_free_sgd")
    assert (free.evaluate, free.hyper, free.state) == (twin.evaluate, twin.hyper, twin.state)
    one, two = (ReferenceOptimizer(rule, [np.ones(3)]) for rule in (free, twin))
    for step in range(4):
        for each in (one, two):
            each.step([np.array([1.0, -2.0, 0.5]) / (step + 1)])
    np.testing.assert_array_equal(one.params[0], two.params[0])


def test_a_history_in_loops() -> None:
    @rulec.rule(
        name="LBFGSDirection", hyper={"memory": {"min": 1, "max": 20, "static": True, "whole": True}},
        state={"s": {"history": "memory"}, "y": {"history": "memory"}, "rho": {"history": "memory", "per": "model"},
               "p_old": 0, "g_old": 0},
    )  # fmt: skip
    def lbfgs(g: Any, p: Any, t: Any, s: Any, *, lr: Any = 1, memory: Any = 10) -> Any:
        s.s = where(t > 1, p - s.p_old, 0)
        s.y = where(t > 1, g - s.g_old, 0)
        sy = total_of(s.s[0] * s.y[0], per="model")
        yy = total_of(s.y[0] * s.y[0], per="model")
        s.rho = where(sy == 0, 0, 1 / sy)
        gamma = where(sy == 0, minimum(1, 1 / norm(g, per="model")), sy / yy)
        q, alpha = g, []
        for i in range(memory):
            alpha.append(s.rho[i] * total_of(s.s[i] * q, per="model"))
            q = q - alpha[i] * s.y[i]
        r = gamma * q
        for i in reversed(range(memory)):
            r = r + s.s[i] * (alpha[i] - s.rho[i] * total_of(s.y[i] * r, per="model"))
        s.p_old = p
        s.g_old = g
        return r

    one, two = (ReferenceOptimizer(rule, [np.ones(3)], {"memory": 2})
                for rule in (lbfgs, rulec.load("lbfgs_direction")))  # fmt: skip
    for _ in range(5):
        for each in (one, two):
            each.step([np.array([1.0, 3.0, 9.0]) * each.params[0]])
    np.testing.assert_array_equal(one.params[0], two.params[0])
    assert {**lbfgs.bind(memory=3).state} == {**rulec.load("lbfgs_direction(memory=3)").state}


def test_passes() -> None:
    ranges = {"rho": {"min": 0}, "sam_eps": {"min": 0}}
    climb = 'p + g*(rho/(norm(g, per="model") + sam_eps))'

    @rulec.rule(name="SAM", wraps="inner", assigns="p", hyper=ranges, passes={"climb": climb})
    def sam(inner: Any, climb: Any, *, rho: Any = 0.05, sam_eps: Any = 1e-12) -> Any:
        inner(climb.g)
        return inner.p

    assert_equal(sam, "sam")


RANK = {"static": True, "whole": True, "min": 1}


def low_rank(**options: Any) -> Rule:
    """The library's wrapper of low rank, with other options."""
    given = {
        "wraps": {"inner": {"shape": ["minimum(rank, rows)", "cols"]}}, "hyper": {"rank": RANK, "gap": RANK},
        "applies_to": "ndim >= 2", "otherwise": "inner", "view": {"short": "first"}, **options,
    }  # fmt: skip

    @rulec.rule(name="LowRank", **given)
    def wrapper(g: Any, t: Any, rows: Any, inner: Any, *, rank: Any = 4, gap: Any = 200) -> Any:
        P = normal([minimum(rank, rows), rows], at=floor((t - 1) / gap)) / sqrt(minimum(rank, rows))
        return transpose(P) @ inner(P @ g)

    return wrapper


def test_a_wrapped_rule_with_a_shape_of_its_own() -> None:
    assert_equal(low_rank(), "low_rank")
    assert low_rank()(rulec.load("adam")).to_yaml() == rulec.load("low_rank(adam)").to_yaml()
    with pytest.raises(RuleError, match=r"the shape of inner of LowRank is a list of two extents, .*, not 4"):
        low_rank(wraps={"inner": {"shape": 4}})
    with pytest.raises(RuleError, match=r"wraps of LowRank is \{'inner': \{.*\}\}, not \{'inner': 4\}"):
        low_rank(wraps={"inner": 4})
    with pytest.raises(RuleError, match=r"inner\.p has no value: inner has a shape of its own"):
        rulec.rule(wraps={"inner": {"shape": [1, "cols"]}}, assigns="p")(lambda g, inner: inner(g) + inner.p)


def test_names_in_other_libraries() -> None:
    names = {"torch": {"class": "SGD", "when": {"momentum": 0}}}
    rule = rulec.rule(interop=names)(lambda g: g)
    assert rule.interop == names
    assert rulec.parse(rule.to_yaml()).interop == names


def test_a_value_stays_in_its_arm() -> None:
    def leaking(g: Any, t: Any, s: Any) -> Any:
        kept = SimpleNamespace()

        def then() -> None:
            s.m = s.m + g
            kept.m = s.m

        cond(t > 1, then)
        return kept.m

    with pytest.raises(RuleError, match="a value of m in one arm of cond is read outside of it: return it from both"):
        rulec.rule(state={"m": 0})(leaking)


def test_a_default_that_follows_another() -> None:
    text = (
        "name: Follows\nhyper: {beta2: 0.99, beta3: {default: sqrt(beta2), min: 0}}\nstep: |\n  direction = g*beta3\n"
    )

    @rulec.rule(hyper={"beta3": {"default": "sqrt(beta2)", "min": 0}})
    def follows(g: Any, *, beta2: Any = 0.99, beta3: Any) -> Any:
        return g * beta3

    assert_equal(follows, rulec.parse(text))


def expression(random: Random) -> tuple[str, str, str]:
    return random.choice("+-*"), random.choice("abcdmvg"), random.choice("abcdmvg")


def body(random: Random, depth: int, size: int) -> list[Any]:
    """Random lines: a local or a state gets a value, or an `if` with two arms and the results of both."""
    lines: list[Any] = []
    for _ in range(size):
        if depth and random.random() < 0.3:
            arms = [
                (body(random, depth - 1, random.randint(0, 3)), [expression(random) for _ in "ab"]) for _ in range(2)
            ]
            lines.append((random.randint(1, 4), arms))
        else:
            lines.append((random.choice("abcdmv"), expression(random)))
    return lines


def value_of(line: tuple[str, str, str], values: dict[str, Any], s: Any) -> Any:
    one, two = (getattr(s, key) if key in "mv" else values[key] for key in line[1:])
    return {"+": lambda: one + two, "-": lambda: one - two, "*": lambda: 0.5 * one * two}[line[0]]()


def run(lines: list[Any], values: dict[str, Any], s: Any) -> None:
    def arm(inside: list[Any], results: list[Any]) -> Any:
        inner = dict(values)
        run(inside, inner, s)
        return tuple(value_of(each, inner, s) for each in results)

    for target, value in lines:
        if isinstance(target, int):
            arms = [lambda each=each: arm(*each) for each in value]
            values["a"], values["b"] = cond(values["t"] > target, *arms)
        elif target in "mv":
            setattr(s, target, value_of(value, values, s))
        else:
            values[target] = value_of(value, values, s)


@pytest.mark.parametrize("seed", range(25))
def test_random_arms_run_as_the_function_runs(seed: int) -> None:
    random = Random(seed)
    lines = body(random, 2, random.randint(2, 6))

    def function(g: Any, t: Any, s: Any) -> Any:
        values = {"g": g, "t": t, "a": 0.5 * g, "b": s.m + g, "c": s.v - g, "d": g * g}
        run(lines, values, s)
        return values["a"] + values["b"] - values["c"] + values["d"] + s.m + s.v

    rule = rulec.rule(state={"m": 0.5, "v": 0.25})(function)
    assert rulec.parse(rule.to_yaml()) == rule
    traced = ReferenceOptimizer(rule, [np.zeros(2)], {"lr": 1})
    plain, p = SimpleNamespace(m=np.full(2, 0.5), v=np.full(2, 0.25)), np.zeros(2)
    for t in range(1, 6):
        g = np.array([0.3, -0.2]) * np.cos(t)
        traced.step([g])
        p = p - function(g, t, plain)
        np.testing.assert_allclose(traced.params[0], p, rtol=1e-9)
        np.testing.assert_allclose(traced.state(0)["m"], plain.m, rtol=1e-9)
