"""Rules as sympy expressions and as LaTeX: equal rules proved equal, there and back, and blocks that balance."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import given, settings

import rulec
from rulec import Rule, RulecError, RuleError
from rulec.language.expr.node import Kind, Node, Op, walk
from rulec.language.hyper import Hyper
from rulec.language.rule_data import Assign
from tests.backends.kinds import BETWEEN, KINDS
from tests.compiler.plain import PlainRun
from tests.language.expressions import arithmetic
from tests.language.test_compose import ADAMW, L2_ADAM, hyper_of, same_steps
from tests.library import by_kind

EXAMPLES = sorted((Path(__file__).parents[1] / "compiler" / "examples").glob("*.yaml"))
ALL = [*rulec.rules(), *(str(path) for path in EXAMPLES)]


def equal(one: Rule, two: Rule) -> bool:
    """Whether sympy can prove that the rules give the same new values."""
    a, b = one.sympy(), two.sympy()
    return a.keys() == b.keys() and all(sympy.simplify(a[key] - b[key]) == 0 for key in a)


def test_adam_plus_decay_equals_adamw() -> None:
    adam, decay = rulec.load("adam"), rulec.load("decay")
    assert equal(adam + decay, rulec.parse(ADAMW))
    assert equal(rulec.load("l2") >> adam, rulec.parse(L2_ADAM))
    assert not equal(adam + decay, rulec.parse(L2_ADAM))


def test_rules_that_are_algebraically_equal() -> None:
    one = rulec.parse(
        "name: A\nhyper: {b: 0.9}\nstate: {m: 0}\nstep: |\n  m = b*m + (1 - b)*g\n  direction = m/(1 - b**t)\n"
    )
    two = rulec.parse(
        "name: B\nhyper: {b: 0.9}\nstate: {m: 0}\nstep: |\n  m = m + (1 - b)*(g - m)\n  direction = -m/(b**t - 1)\n"
    )
    assert one.step != two.step
    assert equal(one, two)


def test_values_are_in_symbols_of_before_the_step() -> None:
    m, g, beta1, t = (sympy.Symbol(n, real=True) for n in ("m", "g", "beta1", "t"))
    t = sympy.Symbol("t", integer=True, positive=True)
    found = rulec.load("adam").sympy()
    assert list(found) == ["m", "v", "direction"]
    assert found["m"] == beta1 * m + (1 - beta1) * g
    assert found["direction"].has(m)
    assert found["direction"].has(beta1**t)
    assert list(rulec.load("rprop").sympy()) == ["prev", "delta", "p"]


def test_what_a_rule_does_to_scales() -> None:
    """Analysis: Adam's direction does not change where the gradient is scaled and eps is 0; SGD's is linear."""
    adam = rulec.load("adam").sympy()["direction"]
    g, m, v, eps, beta1, beta2 = (sympy.Symbol(n, real=True) for n in ("g", "m", "v", "eps", "beta1", "beta2"))
    c = sympy.Symbol("c", positive=True)
    scaled = adam.subs({g: c * g, m: c * m, v: c**2 * v, eps: 0}, simultaneous=True)
    numbers = {g: 3, m: 2, v: 5, c: 7, beta1: sympy.Rational(9, 10), beta2: sympy.Rational(99, 100), "t": 4}
    t = next(s for s in adam.free_symbols if s.name == "t")
    numbers[t] = numbers.pop("t")
    assert sympy.simplify((scaled - adam.subs(eps, 0)).subs(numbers)) == 0
    assert rulec.load("sgd").sympy()["direction"] == g


def there_and_back(rule: Rule) -> Rule:
    found = rule.sympy()
    init = {}
    for key, state in rule.state.items():
        start = state.init.arg if state.init.op is Op.CONST else sympy.Symbol(str(state.init.arg))
        init[key] = {"init": start, "per": state.per}
    return rulec.from_sympy(
        name=rule.name,
        state={k: v for k, v in found.items() if k in rule.state},
        hyper={k: {"default": h.default, **h.limits} for k, h in rule.hyper.items()},
        init=init,
        **{k: v for k, v in found.items() if k not in rule.state},
    )


def is_plain(rule: Rule) -> bool:
    """Whether the lines can be run on one tensor at a time, without matrix functions and random numbers.

    They are the same lines for all hyper-parameters.
    """
    if any(hyper.decides for hyper in rule.hyper.values()):
        return False
    parts = list(walk(rule.expressions))
    wide = {state.per for state in rule.state.values()} | {n.arg for n in parts if n.op.kind is Kind.REDUCE}
    shaped = any(state.shape or state.condition for state in rule.state.values())
    return not (shaped or wide & {"group", "model"} or any(n.op.kind in (Kind.MATRIX, Kind.RANDOM) for n in parts))


#: What sympy has no words for, and how it is refused: a default that is an expression, a condition of a condition, and
#: a reduction over the whole tensor, whose level sympy does not keep.
NO_WAY_BACK = "default of .* is a number, not|sympy's 'ITE' is not part of the rule language|unknown symbol 'None'"


def refused(function: Callable[[Rule], object], rule: Rule) -> str:
    """The words of its RuleError, where there is one."""
    try:
        function(rule)
    except RuleError as error:
        return str(error)
    return ""


def test_a_condition_on_a_choice_that_sympy_cannot_simplify() -> None:
    """The root of t - 1 is real at every step, but not where sympy puts 0 for `t`."""
    found = rulec.load("cautious_adopt").sympy()["direction"]
    found = found.replace(sympy.Function("mean_tensor"), lambda *_: sympy.Integer(1))
    fixed = {"beta1": sympy.Rational(1, 2), "adopt.v": 1, "eps": 1, "weight_decay": 0, "p": 1}
    for t, g, m, value in ((1, 1, 0, 0), (1, 1, 4, 2), (1, 1, -1, 0), (2, 1, 1, 1), (2, 1, -3, 0), (2, -3, -1, -1)):
        numbers = {**fixed, "t": t, "g": g, "grad": g, "adopt.m": m}
        assert found.subs({s: numbers[s.name] for s in found.free_symbols}, simultaneous=True) == value


@pytest.mark.parametrize("rule_name", by_kind(rulec.rules(wrappers=False)))
def test_every_state_has_a_new_value(rule_name: str) -> None:
    rule = rulec.load(rule_name)
    assert rule.sympy().keys() == {*rule.state, "p" if rule.assigns_parameter else "direction"}


@pytest.mark.parametrize(
    "rule_name", by_kind(name for name in rulec.rules(wrappers=False) if is_plain(rulec.load(name)))
)
def test_there_and_back(rule_name: str) -> None:
    rule = rulec.load(rule_name)
    refusal = refused(there_and_back, rule)
    if refusal and rule_name not in (*KINDS, *BETWEEN):
        assert re.search(NO_WAY_BACK, refusal)
        return
    again = there_and_back(rule)
    numbers = {key: replace(hyper, static=False, whole=False) for key, hyper in rule.hyper.items()}
    assert (again.hyper, again.state.keys()) == (numbers, rule.state.keys())
    assert rulec.parse(again.to_yaml()) == again
    rng = np.random.default_rng(0)
    p = rng.normal(size=(1, 2, 3))
    one, two = PlainRun(rule, p, hyper_of(rule.standalone())), PlainRun(again, p, hyper_of(rule.standalone()))
    for _ in range(4):
        g = rng.normal(size=(1, 2, 3))
        one.update(g)
        two.update(g)
    np.testing.assert_allclose(two.p, one.p, rtol=1e-12)
    for key, value in one.states.items():
        np.testing.assert_allclose(two.states[key], value, rtol=1e-11, atol=1e-15)


def test_a_large_power_of_numbers_is_not_worked_out() -> None:
    """Exactly it has billions of digits."""
    g = sympy.Symbol("g", real=True)
    found = rulec.parse("name: R\nstep: |\n  direction = g*1.0000001**1e9\n").sympy()["direction"]
    assert float(found.coeff(g)) == pytest.approx(math.exp(1e9 * math.log1p(1e-7)), rel=1e-12)
    assert rulec.parse("name: R\nstep: |\n  direction = g*9**99\n").sympy()["direction"].coeff(g) == 9**99


def test_a_rule_from_sympy_reads_well() -> None:
    beta, m, g = sympy.symbols("beta1 m g")
    rule = rulec.from_sympy(
        name="Momentum", summary="Momentum.", state={m: beta * m + g}, direction=beta * m + g, hyper={beta: 0.9}
    )
    assert rule.step_text() == "m = beta1*m + g\ndirection = m"
    assert rule.hyper["beta1"].limits == {"min": 0, "below": 1}
    same_steps(rule, rulec.parse("name: R\nhyper: {b: 0.9}\nstate: {m: 0}\nstep: |\n  m = b*m + g\n  direction = m\n"))


def test_everything_sympy_has_that_rules_have_too() -> None:
    x, y, k = sympy.symbols("g p k", real=True)
    truth = sympy.Or(sympy.Eq(x, 1), sympy.Not(x >= k))
    whole = (
        sympy.Abs(x) + sympy.sign(y) * sympy.exp(-x) + sympy.log(2 + x**2) + sympy.tanh(y) + sympy.erf(x)
        + sympy.sin(k) * sympy.cos(k / 3) + sympy.floor(y) + sympy.Min(x, y, k) - sympy.Max(x, 2) + sympy.Mod(x, 3)
        + sympy.pi + sympy.sqrt(1 + y**2) / (3 * x**2 + k) - x**-3 + 2.5 * x - y / 7 - 3
        + sympy.Piecewise((x, (x > y) & (y <= 1)), (y, truth), (k, True))
        + sympy.Function("norm_tensor")(x) * sympy.Function("cbrt")(y)
    )  # fmt: skip
    rule = rulec.from_sympy(name="All", direction=whole, hyper={k: 2})
    rng = np.random.default_rng(0)
    p, g = rng.normal(size=(2, 1, 2, 3))
    found = PlainRun(rule, p, {"k": 2.0}).step(g)["direction"]
    norm = float(np.sqrt((g * g).sum()))
    for index in np.ndindex(p.shape):
        numbers = {x: float(g[index]), y: float(p[index]), k: 2.0}
        exact = whole.subs(sympy.Function("norm_tensor")(x), norm).subs(
            sympy.Function("cbrt")(y), float(np.cbrt(p[index]))
        )
        assert float(exact.subs(numbers)) == pytest.approx(float(found[index]), rel=1e-12)
    assert rulec.parse(rule.to_yaml()) == rule


G = sympy.Symbol("g")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "X needs either direction or p: give one of them"),
        ({"direction": G, "p": G}, "X needs either direction or p: give one of them"),
        ({"direction": sympy.Symbol("q")}, "unknown symbol 'q': declare it under state or hyper"),
        ({"direction": sympy.Symbol("gg")}, "unknown symbol 'gg'; did you mean 'g'?"),
        ({"direction": sympy.tan(G)}, "sympy's 'tan' is not part of the rule language"),
        ({"direction": sympy.I * G}, "sympy's 'ImaginaryUnit' is not part of the rule language"),
        ({"direction": sympy.nan}, "sympy's 'NaN' is not part of the rule language"),
        ({"direction": sympy.zoo}, "sympy's 'ComplexInfinity' is not part of the rule language"),
        ({"direction": sympy.Integral(G, G)}, "sympy's 'Integral' is not part of the rule language"),
        ({"direction": sympy.Function("foo")(G)}, "sympy's 'foo' is not part of the rule language"),
        ({"direction": sympy.Function("norm_tensor")(G, 1)}, "norm_tensor is given 2 arguments: its number is another"),
        ({"direction": "g + 1"}, "a rule is made of sympy's expressions and of numbers, not of 'g + 1'"),
        ({"direction": "exit()"}, "a rule is made of sympy's expressions and of numbers, not of 'exit()'"),
        ({"direction": [1]}, "a rule is made of sympy's expressions and of numbers, not of '[1]'"),
        ({"direction": True}, "a rule is made of sympy's expressions and of numbers, not of 'True'"),
        ({"direction": sympy.eye(1)}, "a rule is made of sympy's expressions and of numbers, not of 'Matrix([[1]])'"),
        ({"direction": sympy.Piecewise((1, G > 0))},
         "a Piecewise of a rule has a value everywhere: end it with (value, True)"),
        ({"direction": G, "hyper": {"k": "a"}}, "default of k of X is a number, not 'a'"),
        ({"direction": G, "hyper": {"k": {"minn": 1}}}, "k of X has no 'minn'; did you mean 'min'?"),
        ({"direction": G, "hyper": {"beta1": 3}},
         "beta1=3.0 of X must be at least 0 and below 1, the range of this name: "
         "write beta1: dict(default=3, min=0, max=3) for another"),
        ({"direction": G, "init": {"m": 1}}, "X has no state 'm' to begin"),
        ({"direction": G, "state": {"m k": G}}, "'m k' is no name: use letters from a to z, digits and _, as in 'm_k'"),
        ({"direction": G, "state": {"t": G}}, "'t' is the step count: choose another name"),
    ],
    ids=str,
)  # fmt: skip
def test_what_rules_have_not(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(RuleError) as caught:
        rulec.from_sympy(name="X", **arguments)
    assert str(caught.value) == says


def test_the_learning_rate_stays_outside() -> None:
    with pytest.raises(RuleError, match="direction depends on lr"):
        rulec.from_sympy(name="X", direction=G * sympy.Symbol("lr"), hyper={"lr": 1})
    rule = rulec.from_sympy(name="X", p=sympy.Symbol("p") - G * sympy.Symbol("lr"), hyper={"lr": 1})
    assert rule.assigns_parameter


@given(arithmetic(("g", "p", "k"), leaves=6))
@settings(max_examples=40, deadline=None)
def test_random_expressions_keep_their_values(value: Node) -> None:
    """sympy's form of an expression, evaluated by sympy, is what the rule computes, where both are finite numbers."""
    rule = Rule("R", (Assign("direction", value),), {"k": Hyper(0.5)})
    try:
        exact = rule.sympy()["direction"]
    except (TypeError, ZeroDivisionError):
        return  # sympy compares no complex infinity
    p, g = np.array([[[0.75, -1.25]]]), np.array([[[1.5, -0.375]]])
    found = PlainRun(rule, p, {"k": 0.5}).step(g)["direction"]
    for i in range(2):
        numbers = {s: {"g": g[0, 0, i], "p": p[0, 0, i], "k": 0.5}[s.name] for s in exact.free_symbols}
        try:
            number = complex(exact.subs(numbers).evalf())
        except (TypeError, ValueError):
            continue
        mine = float(np.broadcast_to(found, p.shape)[0, 0, i])
        if np.isfinite(mine) and np.isfinite(number.real) and abs(number.imag) < 1e-12 and abs(mine) < 1e6:
            if any(n.op in (Op.FLOOR, Op.MOD, Op.FLOORDIV, Op.ISFINITE, Op.RSQRT, Op.CBRT) for n in walk([value])):
                continue  # at a step of theirs rounding decides; cbrt and isfinite have no value in sympy
            assert mine == pytest.approx(number.real, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("rule_name", ALL, ids=lambda n: Path(n).stem)
def test_latex_balances(rule_name: str) -> None:
    rule = rulec.load(rule_name)
    text = rule.latex()
    assert text.startswith("\\begin{aligned}\n")
    assert text.endswith("\n\\end{aligned}")
    lines = text.split("\n")[1:-1]
    assert all("&" in line for line in lines)
    assert all(line.endswith(r" \\") for line in lines[:-1])
    for line in lines:
        assert line.count("{") == line.count("}")
        assert line.count(r"\left") == line.count(r"\right")
        assert line.count(r"\begin") == line.count(r"\end")
        # TeX refuses a second subscript or superscript on one letter.
        assert not re.search(r"_\{[^{}]*\}_|\^\{[^{}]*\}\^|_\{[^{}]*\}\^\{[^{}]*\}[_^]", line)
    assert "p_{t} &= " in text


def test_latex() -> None:
    assert (
        rulec.load("adamw").latex()
        == r"""\begin{aligned}
  m_{t} &= \beta_{1} \, m_{t-1} + \left(1 - \beta_{1}\right) \, g_{t} \\
  v_{t} &= \beta_{2} \, v_{t-1} + \left(1 - \beta_{2}\right) \, g_{t}^{2} \\
  \hat{m}_{t} &= \frac{m_{t}}{1 - \beta_{1}^{t}} \\
  \sigma_{t} &= \frac{\sqrt{v_{t}}}{\sqrt{1 - \beta_{2}^{t}}} \\
  \Delta_{t}^{\mathrm{adam}} &= \frac{\hat{m}_{t}}{\sigma_{t} + \epsilon} \\
  \Delta_{t}^{\mathrm{decay}} &= \mathrm{weight\_decay} \, p_{t-1} \\
  \Delta_{t} &= \Delta_{t}^{\mathrm{adam}} + \Delta_{t}^{\mathrm{decay}} \\
  p_{t} &= p_{t-1} - \mathrm{lr} \, \Delta_{t}
\end{aligned}"""
    )


@pytest.mark.parametrize(
    ("expression", "latex"),
    [
        ("-g**2", "-g_{t}^{2}"),
        ("(-g)**2", r"\left(-g_{t}\right)^{2}"),
        ("g - (p - m)", r"g_{t} - \left(p_{t-1} - m_{t-1}\right)"),
        ("g*-p", r"g_{t} \, \left(-p_{t-1}\right)"),
        ("g + -2", r"g_{t} + \left(-2\right)"),
        ("m*g*g", r"m_{t-1} \, g_{t}^{2}"),
        ("m*(g - p)*(g - p)", r"m_{t-1} \, \left(g_{t} - p_{t-1}\right)^{2}"),
        ("2*g*g", r"2 \, g_{t}^{2}"),
        ("g*g*g", r"g_{t} \, g_{t}^{2}"),
        ("2*3*g", r"2 \cdot 3 \, g_{t}"),
        ("g/(p*m)", r"\frac{g_{t}}{p_{t-1} \, m_{t-1}}"),
        ("(g/p)**2", r"\left(\frac{g_{t}}{p_{t-1}}\right)^{2}"),
        ("(g + p)*m", r"\left(g_{t} + p_{t-1}\right) \, m_{t-1}"),
        ("1e-8*g", r"10^{-8} \, g_{t}"),
        ("2.5e-8*g", r"2.5 \cdot 10^{-8} \, g_{t}"),
        ("minimum(g, inf)", r"\min\left(g_{t}, \infty\right)"),
        ("pi*g", r"\pi \, g_{t}"),
        ("g % 2", r"g_{t} \bmod 2"),
        ("g // 2", r"\left\lfloor \frac{g_{t}}{2}\right\rfloor"),
        ("where(g > 0, 1, where(g == 0, 2, 3))",
         r"\begin{cases} 1 & \text{if } g_{t} > 0 \\ 2 & \text{if } g_{t} = 0 \\ 3 & \text{otherwise} \end{cases}"),
        ("where(not (g <= 0 or p != m) and t >= 2, g, p)",
         r"\begin{cases} g_{t} & \text{if } \lnot \left(g_{t} \le 0 \lor p_{t-1} \ne m_{t-1}\right) \land t \ge 2 \\ "
         r"p_{t-1} & \text{otherwise} \end{cases}"),
        ("rsqrt(g)*cbrt(p)", r"\frac{1}{\sqrt{g_{t}}} \, \sqrt[3]{p_{t-1}}"),
        ("abs(g)**2", r"\left|g_{t}\right|^{2}"),
        ("norm(g) + norm(p, per='row')",
         r"\left\lVert g_{t}\right\rVert_{2} + \left\lVert p_{t-1}\right\rVert_{2,\mathrm{row}}"),
        ("mean(g, per='model')", r"\operatorname{mean}_{\mathrm{model}}\left(g_{t}\right)"),
        ("transpose(g) @ p", r"g_{t}^{\top} \, p_{t-1}"),
        ("grad*weight_decay", r"\nabla_{t} \, \mathrm{weight\_decay}"),
        ("beta1**(t + 1)", r"\beta_{1}^{t + 1}"),
        ("mu_next*x0", r"\mu_{\mathrm{next}} \, x_{0,t-1}"),
    ],
)  # fmt: skip
def test_latex_of_expressions(expression: str, latex: str) -> None:
    rule = rulec.parse(
        "name: R\nhyper: {weight_decay: 0, beta1: 0, mu_next: 0}\nstate: {m: 0, x0: 0}\n"
        f"step: |\n  direction = {expression} + 0*m + 0*x0\n"
    )
    line = rule.latex().split("\n")[1]
    assert line.startswith(r"  \Delta_{t} &= ")
    shown = line.removeprefix(r"  \Delta_{t} &= ").removesuffix(r" + 0 \, m_{t-1} + 0 \, x_{0,t-1} \\")
    assert shown in (latex, rf"\left({latex}\right)")


def test_latex_behind_a_branch_reads_what_the_branch_assigned() -> None:
    """shampoo refreshes its roots in some steps, and reads them in all."""
    assert r"\Delta_{t} &= \mathrm{pl}_{t} \, g_{t} \, \mathrm{pr}_{t}" in rulec.load("shampoo").latex()
    rule = rulec.parse(
        "name: R\nstate: {a: 0, b: 0}\nstep: |\n  if t == 1:\n    a = g\n  else:\n    b = g\n  direction = a + b\n"
    )
    assert r"  \Delta_{t} &= a_{t} + b_{t} \\" in rule.latex().split("\n")


def test_latex_of_branches_and_repeated_names() -> None:
    rule = rulec.parse(
        "name: R\nstate: {m: 0}\nevaluate: p + m\nstep: |\n  d = g\n  if ndim >= 2:\n    d = d + m\n    m = d\n"
        "  else:\n    m = g\n  m = 2*m\n  p = p - m\n  p = p*d\n"
    )
    assert rule.latex().split("\n")[1:-1] == [
        r"  d_{t}^{(1)} &= g_{t} \\",
        r"  d_{t} &= \begin{cases} d_{t}^{(1)} + m_{t-1} & \text{if } \mathrm{ndim} \ge 2 \\ d_{t}^{(1)} "
        r"& \text{otherwise} \end{cases} \\",
        r"  m_{t}^{(1)} &= \begin{cases} d_{t} & \text{if } \mathrm{ndim} \ge 2 \\ "
        r"m_{t-1} & \text{otherwise} \end{cases} \\",
        r"  m_{t}^{(2)} &= \begin{cases} g_{t} & \text{if } \mathrm{ndim} < 2 \\ "
        r"m_{t}^{(1)} & \text{otherwise} \end{cases} \\",
        r"  m_{t} &= 2 \, m_{t}^{(2)} \\",
        r"  p_{t}^{(1)} &= p_{t-1} - m_{t} \\",
        r"  p_{t} &= p_{t}^{(1)} \, d_{t} \\",
        r"  \text{evaluated at}\quad & p_{t} + m_{t}",
    ]


@pytest.mark.parametrize(
    ("lines", "latex"),
    [
        ("x = g\nif t <= 3:\n  x = 2*g",
         [r"x_{t}^{(1)} &= g_{t}",
          r"x_{t} &= \begin{cases} 2 \, g_{t} & \text{if } t \le 3 \\ x_{t}^{(1)} & \text{otherwise} \end{cases}"]),
        ("if t <= 3:\n  x = 2*g\nelse:\n  x = g",
         [r"x_{t} &= \begin{cases} 2 \, g_{t} & \text{if } t \le 3 \\ g_{t} & \text{otherwise} \end{cases}"]),
        ("if t == 1:\n  x = g\nelif t == 2:\n  x = p\nelse:\n  x = m",
         [r"x_{t} &= \begin{cases} g_{t} & \text{if } t = 1 \\ p_{t-1} & \text{if } t = 2 \\ "
          r"m_{t-1} & \text{otherwise} "
          r"\end{cases}"]),
        ("x = m\nif t > 1:\n  if ndim == 2 or ndim == 3:\n    x = g\n  else:\n    x = p",
         [r"x_{t}^{(1)} &= m_{t-1}",
          r"x_{t} &= \begin{cases} g_{t} "
          r"& \text{if } t > 1 \land \left(\mathrm{ndim} = 2 \lor \mathrm{ndim} = 3\right) \\ "
          r"p_{t-1} & \text{if } t > 1 \\ x_{t}^{(1)} & \text{otherwise} \end{cases}"]),
        ("x = g\nif t % 2 == 0:\n  x = x + 1\n  x = 2*x",
         [r"x_{t}^{(1)} &= g_{t}",
          r"x_{t}^{(2)} &= \begin{cases} x_{t}^{(1)} + 1 & \text{if } t \bmod 2 = 0 \\ x_{t}^{(1)} & \text{otherwise} "
          r"\end{cases}",
          r"x_{t} &= \begin{cases} 2 \, x_{t}^{(2)} & \text{if } t \bmod 2 = 0 \\ x_{t}^{(2)} & \text{otherwise} "
          r"\end{cases}"]),
        ("x = g\nk = sum(g)\nif k > 1:\n  k = 0\n  x = p",  # the condition is of the value before
         [r"x_{t}^{(1)} &= g_{t}", r"k_{t}^{(1)} &= \operatorname{sum}_{\mathrm{tensor}}\left(g_{t}\right)",
          r"k_{t} &= \begin{cases} 0 & \text{if } k_{t}^{(1)} > 1 \\ k_{t}^{(1)} & \text{otherwise} \end{cases}",
          r"x_{t} &= \begin{cases} p_{t-1} & \text{if } k_{t}^{(1)} > 1 \\ "
          r"x_{t}^{(1)} & \text{otherwise} \end{cases}"]),
        ("x = g\nif t == 1 or t == 5:\n  y = p\n  x = y",  # a name of one arm
         [r"x_{t}^{(1)} &= g_{t}", r"y_{t} &= p_{t-1}\quad\text{if } t = 1 \lor t = 5",
          r"x_{t} &= \begin{cases} y_{t} & \text{if } t = 1 \lor t = 5 \\ x_{t}^{(1)} & \text{otherwise} \end{cases}"]),
        ("k = 0.5*norm(g)\nx = k*(g*p) @ transpose(m)*g**2",
         [r"k_{t} &= 0.5 \, \left\lVert g_{t}\right\rVert_{2}",
          r"x_{t} &= k_{t} \, \left(g_{t} \odot p_{t-1}\right) \, m_{t-1}^{\top} \odot g_{t}^{\odot 2}"]),
    ],
)  # fmt: skip
def test_latex_of_branches_is_cases(lines: str, latex: list[str]) -> None:
    step = "".join(f"  {line}\n" for line in f"{lines}\ndirection = x + 0*m".split("\n"))
    shown = rulec.parse(f"name: R\nstate: {{m: 0}}\nstep: |\n{step}").latex().split("\n")
    assert [line.strip().removesuffix(r" \\") for line in shown[1:-3]] == latex


@pytest.mark.parametrize("rule_name", rulec.rules())
def test_latex_reads_no_value_of_a_line_below(rule_name: str) -> None:
    shown = [line.strip().partition(" &= ") for line in rulec.load(rule_name).latex().split("\n")[1:-1]]
    names = [left.split(", ") if right else [] for left, _, right in shown]
    for index, (_, _, right) in enumerate(shown):
        for later in {name for lefts in names[index:] for name in lefts}:
            read = right.replace(r"\left(", " ").replace("{" + later + "}", later)
            assert not re.search(rf"(?<![\w}}\\]){re.escape(later)}(?![\w^_])", read), (later, right)
        assert right == "" or len(names[index]) == len({*names[index]})
    lefts = [name for line in names for name in line]
    assert len(lefts) == len({*lefts})


def test_a_missing_sympy_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sympy", None)
    rule = rulec.load("adam")
    assert r"\beta_{1}" in rule.latex()
    for ask in (rule.sympy, lambda: rulec.from_sympy(name="None", direction=1)):
        with pytest.raises(RulecError, match=r"^an expression of sympy needs sympy, which is not installed: pip "):
            ask()
