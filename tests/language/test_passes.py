"""Rules with several gradients in a step: their lowering, their composition, and their mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rulec
from rulec import Rule, RuleError
from rulec.compiler.reference import ReferenceOptimizer

SAM = """
name: Climbing
wraps: inner
hyper: {rho: 0.1}
passes:
  climb: p + rho*g
step: |
  direction = inner(climb.g) + 0.5*g
"""

EVERY_OTHER = """
name: EveryOther
hyper: {rho: 0.1}
passes:
  climb:
    point: p + rho*g
    when: t % 2 == 0
step: |
  direction = climb.g + 0.5*g
"""

THREE = """
name: Three
passes:
  a: p + g
  b: p - 2*a.g + g
step: |
  p = p - 0.01*(g + 2*a.g + 3*b.g)
"""


def gradient(params: Any) -> list[Any]:
    """The gradients of the sum of sines."""
    return [np.cos(p) for p in params]


def stepped(rule: Rule, steps: int = 1, **hyper: float) -> float:
    """The parameter 0.3 after some steps by the reference."""
    optimizer = ReferenceOptimizer(rule, [np.array(0.3)], hyper)
    for _ in range(steps):
        optimizer.step(gradient(optimizer.params), gradient=gradient)
    return float(optimizer.params[0])


def test_the_end_of_a_step_has_the_last_gradient_and_the_others_as_inputs() -> None:
    rule = rulec.parse(THREE)
    ended = rule.standalone()
    assert ended.step_text() == "p = p - 0.01*(start.g + 2*a.g + 3*g)"
    assert ended.inputs == {"start.g": "like p", "a.g": "like p"}
    assert [move.rule.step_text() for move in ended.moves] == ["p = p + g", "p = p - 2*g + start.g"]
    assert ended.standalone() is ended


def test_every_pass_begins_where_the_parameter_was() -> None:
    first = np.cos(0.3)
    second = np.cos(0.3 + first)
    third = np.cos(0.3 - 2 * second + first)
    assert stepped(rulec.parse(THREE)) == pytest.approx(0.3 - 0.01 * (first + 2 * second + 3 * third), abs=1e-15)


def test_a_pass_of_some_steps_asks_for_no_gradient_in_the_others() -> None:
    rule, points = rulec.parse(EVERY_OTHER), []
    optimizer = ReferenceOptimizer(rule, [np.array(0.3)], {"lr": 0.1})

    def counted(params: Any) -> Any:
        points.append(float(params[0]))
        return gradient(params)

    for _ in range(5):
        optimizer.step(gradient(optimizer.params), gradient=counted)
    x = 0.3
    for t in range(1, 6):
        first = np.cos(x)
        x -= 0.1 * ((np.cos(x + 0.1 * first) if t % 2 == 0 else first) + 0.5 * first)
    assert len(points) == 2
    assert float(optimizer.params[0]) == pytest.approx(x, abs=1e-15)


def test_it_is_written_and_read_back() -> None:
    for text in (THREE, EVERY_OTHER, SAM):
        rule = rulec.parse(text)
        assert rulec.parse(rule.to_yaml()) == rule
    around = rulec.load("sam(adamw)")
    assert rulec.parse(around.to_yaml()) == around
    assert r"p_{t}^{(climb)} &= p_{t-1} + \rho \, g_{t}" in rulec.parse(EVERY_OTHER).latex()


def test_python_is_the_same() -> None:
    @rulec.rule(wraps="inner", passes={"climb": "p + rho*g"})
    def climbing(g: Any, inner: Any, climb: Any, *, rho: float = 0.1) -> Any:
        return inner(climb.g) + 0.5 * g

    @rulec.rule(passes={"climb": {"point": "p + rho*g", "when": "t % 2 == 0"}})
    def every_other(g: Any, climb: Any, *, rho: float = 0.1) -> Any:
        return climb.g + 0.5 * g

    adam = rulec.load("adam")
    assert climbing(adam).step_text() == rulec.parse(SAM)(adam).step_text()
    assert climbing(adam).passes == rulec.parse(SAM)(adam).passes
    assert every_other.standalone().step_text() == rulec.parse(EVERY_OTHER).standalone().step_text()


def test_an_inner_rule_may_see_another_point() -> None:
    wrapper = rulec.parse("""
name: Elsewhere
wraps: inner
step: |
  inner(g, p=2*p)
  p = inner.p
""")
    # Decay of twice the parameter, and a step from there.
    decayed = wrapper(rulec.load("sgd") + rulec.load("decay"))
    expected = 2 * 0.3 - 0.1 * (np.cos(0.3) + 0.5 * 2 * 0.3)
    assert stepped(decayed, lr=0.1, weight_decay=0.5) == pytest.approx(expected, abs=1e-15)
    assert rulec.parse(wrapper.to_yaml()) == wrapper
    # Rprop assigns p itself: from the point that it sees.
    assigned = wrapper(rulec.parse("name: Own\nstep: |\n  p = p - 0.1*g\n"))
    assert stepped(assigned) == pytest.approx(2 * 0.3 - 0.1 * np.cos(0.3), abs=1e-15)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("clip_by_value >> sam(adam)", "put clip_by_value inside of the wrapper with the passes"),
        ("accumulate(sam(adam))", "calls it at some steps, or with values of its own: put Accumulate inside of it"),
        ("sam(sam(adam))", "put SAM inside of it"),
        ("low_rank(sam(adam))", "SAMAdam assigns p itself, and LowRank needs the direction"),
    ],
)
def test_compositions_that_do_not_fit(text: str, says: str) -> None:
    with pytest.raises(RuleError) as caught:
        rulec.load(text)
    assert says in str(caught.value)


def test_compositions_that_fit() -> None:
    for text in ("sam(clip_by_value >> adam)", "lookahead(sam(adamw))", "sam(accumulate(adam))", "sam(muon)"):
        rule = rulec.load(text)
        while rule is not None:
            assert len(rule.standalone().moves) == 1
            rule = rule.rest  # type: ignore[assignment]


def test_the_analysis_sees_the_passes() -> None:
    assert rulec.load("sam(adamw)").analysis.scope == "model"
    assert rulec.parse(THREE).analysis.scope == "elementwise"


def test_names_of_both_rules_stay_apart() -> None:
    rule = rulec.parse("""
name: Outer
wraps: inner
state: {m: 0}
passes: {climb: p + m}
step: |
  m = climb.g
  direction = inner(climb.g)
""")(rulec.load("momentum"))
    assert list(rule.state) == ["momentum.m", "outer.m"]
    assert rule.standalone().moves[0].rule.step_text() == "p = p + outer.m"
    assert rule.bind(momentum="beta").passes == rule.passes
