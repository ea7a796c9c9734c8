"""The evaluation point: what the two changes in place do, and that the second takes back the first."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
import sympy
from hypothesis import assume, given
from hypothesis import strategies as st

import rulec
from rulec import Rule, RuleError
from rulec.compiler.interpreter import Run
from rulec.compiler.pipeline import compile
from rulec.compiler.reference import ReferenceOptimizer
from rulec.language.eval_point import invert, to_evaluation, to_training
from rulec.language.expr.arithmetic import mpmath_context, mpmath_table
from rulec.language.expr.node import Node, Op, walk

SCHEDULE_FREE = ("schedule_free_sgd", "schedule_free_adamw")

AVERAGED = """
name: Averaged
hyper: {lr: 0.1}
state: {average: p}
step: |
  p = p - lr*g
  average = average + (p - average)/t
evaluate: average
"""


def mixing(text: str, hyper: str = "a: 0.7, b: 3") -> str:
    body = "state: {z: p, y: 1}\nstep: |\n  z = z*y\n  y = y\n  direction = g\n"
    return f"name: Mixing\nhyper: {{{hyper}}}\n{body}evaluate: {text}\n"


def move(optimizer: ReferenceOptimizer, moving: Rule | None) -> None:
    """Runs the one step of `moving` over the parameters and states that an optimizer holds."""
    assert moving is not None
    for part in optimizer._parts.values():
        static = {k: v for k, v in part.hyper[0].items() if moving.hyper[k].static}
        program = compile(moving, part.tensors[0].view.facts, static)
        run = Run(program, part.tensors, part.hyper, optimizer.how, part.shared, {}, 0)
        run.write(*run.execute())


def exact(value: Node, names: dict[str, Any]) -> Any:
    """A value in 50 digits."""
    table, found = mpmath_table(), dict[Node, Any]()
    for part in walk([value]):
        if part.op is Op.CONST:
            found[part] = mpmath_context().mpf(part.arg)
        else:
            found[part] = names[str(part.arg)] if part.op is Op.NAME else table[part.op](*(found[a] for a in part.args))
    return found[value]


def numbers(rule: Rule, seed: int) -> dict[str, Any]:
    """A value for everything that the evaluation point may name: hyper-parameters near their defaults, states."""
    rng = np.random.default_rng(seed)
    real = mpmath_context().mpf
    found = {key: real(h.default) for key, h in rule.hyper.items() if isinstance(h.default, float)}
    return found | {key: real(rng.normal()) for key in (*rule.state, "p")}


@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_schedule_free_rules_come_back_to_45_digits(name: str) -> None:
    rule = rulec.load(name)
    assert rule.evaluate is not None
    for seed in range(20):
        given_ = numbers(rule, seed)
        there = exact(rule.evaluate, given_)
        assert there != given_["p"]
        assert mpmath.almosteq(exact(invert(rule), {**given_, "p": there}), given_["p"], rel_eps=mpmath.mpf(10) ** -45)


@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_schedule_free_rules_come_back_by_algebra(name: str) -> None:
    rule = rulec.load(name)
    there, back = to_evaluation(rule), to_training(rule)
    assert there is not None
    assert back is not None
    p = sympy.Symbol("p", real=True)
    new, old = there.sympy()["p"], back.sympy()["p"]
    symbol = next(s for s in old.free_symbols if s.name == "p")
    assert p.name == symbol.name
    assert sympy.simplify(old.subs(symbol, new) - symbol) == 0
    assert sympy.simplify(new - symbol) != 0


PARTS = st.sampled_from(["a", "b", "z", "y", "2", "0.5", "(a + 1)", "(1 - 1/b)", "rows"])


@st.composite
def affine(draw: Any, depth: int = 4) -> str:
    """The text of a value that is affine in `p`."""
    if depth == 0 or draw(st.integers(0, 5)) == 0:
        return "p"
    inner, part = draw(affine(depth=depth - 1)), draw(PARTS)
    form = draw(
        st.sampled_from(
            [
                "({0} + {1})",
                "({1} - {0})",
                "{1}*{0}",
                "{0}*{1}",
                "({0})/{1}",
                "-({0})",
                "where({1} > 0, {0}, {2})",
                "({0} + {2})",
            ]
        )
    )
    return str(form.format(inner, part, draw(affine(depth=depth - 1))))


@given(affine(), st.integers(0, 1000))
def test_random_affine_points_come_back_to_45_digits(text: str, seed: int) -> None:
    try:
        rule = rulec.parse(mixing(text))
    except RuleError as error:
        assume("cancels out" not in error.message)
        raise
    assert rule.evaluate is not None
    given_ = {**numbers(rule, seed), "rows": mpmath_context().mpf(7)}
    there = exact(rule.evaluate, given_)
    slope = exact(rule.evaluate, {**given_, "p": given_["p"] + 1}) - there
    # Where the slope happens to be next to nothing, digits are lost: that is the point's doing, not the inverse's.
    assume(abs(slope) > 1e-3 and abs(there) < 1e3)
    back = exact(invert(rule), {**given_, "p": there})
    assert abs(back - given_["p"]) < mpmath.mpf(10) ** -43


@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_training_goes_on_as_if_never_evaluated(name: str) -> None:
    rule, rng = rulec.load(name), np.random.default_rng(3)
    params = [rng.normal(size=(3, 4)), rng.normal(size=5)]
    one, other = ReferenceOptimizer(rule, params), ReferenceOptimizer(rule, params)
    for number in range(6):
        grads = [rng.normal(size=p.shape) for p in params]
        one.step(grads)
        other.step(grads)
        move(one, to_evaluation(rule))
        # The average of one point is that point.
        assert np.allclose(one.params[0], other.params[0], rtol=1e-9, atol=0) == (number == 0)
        move(one, to_training(rule))
    for a, b in zip(one.params, other.params, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13)


def test_an_average_is_exchanged_and_comes_back_bit_for_bit() -> None:
    rule, rng = rulec.parse(AVERAGED), np.random.default_rng(4)
    optimizer = ReferenceOptimizer(rule, [rng.normal(size=(2, 3))])
    for _ in range(5):
        optimizer.step([rng.normal(size=(2, 3))])
    p, average = optimizer.params[0], optimizer.state(0)["average"]
    move(optimizer, to_evaluation(rule))
    np.testing.assert_array_equal(optimizer.params[0], average)
    np.testing.assert_array_equal(optimizer.state(0)["average"], p)
    move(optimizer, to_training(rule))
    np.testing.assert_array_equal(optimizer.params[0], p)
    np.testing.assert_array_equal(optimizer.state(0)["average"], average)


def test_most_rules_are_evaluated_where_they_are() -> None:
    assert to_evaluation(rulec.load("adam")) is None
    assert to_training(rulec.load("adam")) is None


def test_composed_rules_keep_the_one_evaluation_point() -> None:
    rule = rulec.load("clip_by_value >> schedule_free_sgd")
    assert rule.evaluate is rulec.load("schedule_free_sgd").evaluate
    with pytest.raises(RuleError, match=r"both say evaluate: only one of them may"):
        rulec.load("ema(schedule_free_sgd)")


@pytest.mark.parametrize(
    "text",
    ["p*p", "sqrt(p)", "p**2", "1/p", "where(p > 0, p, z)", "maximum(p, z)", "z*where(y > 0, p, 0)*p", "-abs(p)"],
)
def test_what_cannot_be_taken_back_is_refused_at_its_line(text: str) -> None:
    with pytest.raises(RuleError) as caught:
        rulec.parse(mixing(text), "r.yaml")
    says = "p cannot be found again from the evaluation point of Mixing: it must be a*p + b with a and b free of p, or"
    carets = f"    evaluate: {text}\n              {'^' * len(text)}"
    assert str(caught.value) == f"r.yaml:8:11: {says} one state\n{carets}"


@pytest.mark.parametrize("text", ["p - p + z", "p + (z - p)", "z + 0*p", "(a - a)*p + z", "(b - 3)*p + z", "p/(b - 3)"])
def test_a_point_that_p_cancels_out_of_is_refused(text: str) -> None:
    with pytest.raises(RuleError, match=r"r.yaml:8:11: p cancels out of the evaluation point of Mixing, so it could"):
        rulec.parse(mixing(text), "r.yaml")


@pytest.mark.parametrize("text", ["z + y", "2*z", "a", "rows"])
def test_a_point_without_p_is_one_state(text: str) -> None:
    with pytest.raises(
        RuleError, match=r"r.yaml:8:11: the evaluation point of Mixing has no p in it: then it must be one"
    ):
        rulec.parse(mixing(text), "r.yaml")
