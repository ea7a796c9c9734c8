"""What counts is a whole number in a range: iterations, rows, columns, singular vectors. The same on every road."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rulec
import rulec.math as rm
from rulec import RuleError
from rulec.array import Optimizer
from rulec.compiler.reference import ReferenceOptimizer


def rule_of(step: str, head: str = "") -> rulec.Rule:
    return rulec.parse(f"name: R\n{head}step: |\n  " + step.replace("\n", "\n  ") + "\n")


def by_reference(rule: rulec.Rule, param: np.ndarray[Any, Any], **hyper: float) -> None:
    ReferenceOptimizer(rule, [param], hyper).step([param])


def by_optimizer(rule: rulec.Rule, param: np.ndarray[Any, Any], **hyper: float) -> None:
    Optimizer(rule, [param], "numpy", **hyper).step([param + 1])


ROADS = pytest.mark.parametrize("run", [by_reference, by_optimizer])

_STEP = "m = 2*m\ndirection = g*sum(m)"
_STATE = "state: {{m: {{init: 0, shape: [{}]}}}}\n"


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("direction = newton_schulz(g, steps=1e9)", "number of steps of newton_schulz .* from 0 to 100, not 1e"),
        ("direction = newton_schulz(g, steps=inf - inf)", "from 0 to 100, not inf - inf = nan"),
        ("direction = newton_schulz(g, steps=2.5)", "from 0 to 100, not 2.5"),
        ("direction = newton_schulz(g, steps=-1)", "from 0 to 100, not -1"),
        ("direction = g*sum(newton_schulz(normal([-3, 2])))", "an extent of normal must be .* from 0, not -3"),
        (
            "direction = g*sum(uniform([inf*0, 2]))",
            r"an extent of uniform must be a whole number from 0, not inf\*0 = nan",
        ),
        ("direction = g*sum(uniform([2, inf]))", "an extent of uniform must be a whole number from 0, not inf"),
        ("direction = g*sum(uniform([1e18, 1e18]))", r"1e\+18 by 1e\+18 elements are more than any memory holds"),
        ("direction = g*sum(singular_vectors(g, 0))", "the rank of singular_vectors must be .* from 1, not 0"),
        ("direction = g*sum(singular_vectors(g, -inf))", "the rank of singular_vectors must be .* from 1, not -inf"),
    ],
)
def test_a_number_that_is_none_is_refused_where_it_is_called(step: str, message: str) -> None:
    with pytest.raises(RuleError, match=message) as caught:
        rule_of(step)
    called = step.index(re.split(" must | is ", str(caught.value))[0].split()[-1])
    assert caught.value.place.endswith(f":{called + 3}")


@ROADS
@pytest.mark.parametrize(
    ("step", "head", "message"),
    [
        ("direction = g*sum(uniform([0 - rows, 2]))", "", "not 0 - rows = -3 for a matrix of 3 by 4: say under"),
        ("direction = g*sum(uniform([rows*1e9, 1e9]))", "", r"3e\+09 by 1e\+09 elements for a matrix of 3 by 4 are"),
        ("direction = g*sum(g[0:5])", "", r"'g\[0:5\]' ends at 5 of 3 rows for a matrix of 3 by 4"),
        ("direction = g*sum(g[:, :k])", "hyper: {k: {default: 6, static: true}}\n", "6 of 4 cols .*: choose another k"),
        ("direction = g*sum(g[:, cols - 5:])", "", "from 0, not cols - 5 = -1"),
        ("direction = g*sum(g[2:rows - 2])", "", "from 0, not rows - 4 = -1"),
        ("direction = g*sum(g[:t])", "", "must be known before a step"),
        ("direction = g*sum(eye(rows - 5))", "", "an extent of eye must be a whole number from 0, not rows - 5 = -2"),
        ("direction = g*sum(uniform([t, 2]))", "", "an extent of uniform must be known before a step"),
        ("direction = g*sum(uniform([sum(g), 2]))", "", "an extent of uniform must be known before a step"),
        ("direction = newton_schulz(g, steps=sum(g))", "", "the number of steps of newton_schulz must be known before"),
        (_STEP, _STATE.format("1e12, 1e12"), r"state m is too large: 1e\+12 by 1e\+12 .* 3 by 4"),
        (_STEP, _STATE.format("1e9*cols, 1e9"), r"state m is too large: 4e\+09 by .* 3 by 4"),
        (_STEP, _STATE.format("rows - 9, 2"), "rows - 9 = -6 for a matrix of 3 by 4: say under"),
        (_STEP, _STATE.format("rows/2, 2"), "not rows/2 = 1.5 for a matrix of 3 by 4"),
        (_STEP, "hyper: {k: 2}\n" + _STATE.format("k, 2"), "depends on k, .* declare k static"),
    ],
)  # fmt: skip
def test_an_extent_that_is_none_for_a_shape_is_refused_at_its_line(
    run: Callable[..., None], step: str, head: str, message: str
) -> None:
    param = np.ones((3, 4))
    with pytest.raises(RuleError, match=message) as caught:
        run(rule_of(step, head), param)
    assert caught.value.place
    assert (param == 1).all()


def test_a_state_larger_than_memory_is_refused_without_a_shape() -> None:
    with pytest.raises(RuleError, match="state m is too large"):
        rulec.compile(rule_of(_STEP, _STATE.format("1e12, 1e12")))


@ROADS
@pytest.mark.parametrize("count", [1e9, 2.5, -1])
def test_a_number_of_steps_that_may_change_is_looked_at_in_each(run: Callable[..., None], count: float) -> None:
    rule = rule_of("direction = newton_schulz(g, steps=k + t)", "hyper: {k: 2}\n")
    run(rule, np.ones((3, 4)))
    with pytest.raises(RuleError, match="newton_schulz must be a whole number from 0 to 100, not"):
        run(rule, np.ones((3, 4)), k=count - (count == -1))


@ROADS
def test_a_draw_is_named_by_a_finite_number(run: Callable[..., None]) -> None:
    with pytest.raises(RuleError, match="must be a finite number, not at = nan"):
        run(rule_of("direction = g*normal([rows, cols], at=log(1 - 2*t))"), np.ones((3, 4)))


def test_python_rules_say_the_author_s_line() -> None:
    def f(g: Any) -> Any:
        return rm.newton_schulz(g, steps=1e9)

    with pytest.raises(RuleError, match=r"test_counts\.py:\d+:16: the number of steps of newton_schulz must be"):
        rulec.rule(f)


def test_on_arrays_too() -> None:
    for call in (lambda: rm.newton_schulz(np.eye(3), 1e9), lambda: rm.uniform([-1, 3], at=1)):
        with pytest.raises(RuleError, match="must be a whole number from 0"):
            call()
