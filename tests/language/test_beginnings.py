"""First values of matrices, reductions and random numbers: the lines that stand for them, and the states they give."""

from __future__ import annotations

import numpy as np
import pytest

import rulec
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import RuleError
from rulec.language.tracing.decorator import rule as rule_of

TEXT = """\
name: Begun
hyper: {lr: 1.0}
state:
  q: {init: 2*eye(rows), shape: [rows, rows], if: ndim >= 2}
  n: {init: norm(p), per: tensor}
  z: {init: "uniform([rows, cols], at=0)"}
step: |
  noise = uniform([rows, cols])
  n = n + 1
  z = z + 0*noise
  if ndim >= 2:
    q = q + eye(rows)
    direction = q @ g/n
  else:
    direction = g/n
"""


def test_a_state_begins_in_the_first_step_after_the_draws_of_the_step() -> None:
    rule = rulec.parse(TEXT)
    assert rule.step_text().startswith(
        "if ndim >= 2:\n  if t == 1:\n    q = 2*eye(rows)\nif t == 1:\n"
        '  n = norm(p, per="tensor")\n  z = uniform([rows, cols], at=0, draw=1)\nnoise = '
    )
    assert rulec.parse(rule.to_yaml()).step_text() == rule.step_text()
    p, g = np.array([[3.0, 0.0], [0.0, 4.0]]), np.array([[1.0, 2.0], [3.0, 4.0]])
    reference, weights = ReferenceOptimizer(rule, [p.copy()]), [p.copy()]
    optimizer = rulec.array.Optimizer(rule, weights, backend="c")
    for _ in range(2):
        reference.step([g])
        optimizer.step([g])
    for moved, state in ((reference.params, reference.state(0)), (weights, optimizer.state("0"))):
        np.testing.assert_array_equal(np.reshape(state["q"], (2, 2)), 4 * np.eye(2))
        assert np.asarray(state["n"]).item() == 7
        np.testing.assert_array_equal(np.reshape(state["z"], (2, 2)), rulec.math.uniform([2, 2], at=0, draw=1))
        np.testing.assert_allclose(moved[0], p - 3 * g / 6 - 4 * g / 7, rtol=1e-15)


def test_python_says_the_same_and_a_wrapper_begins_it_in_the_first_update() -> None:
    def begun(g, s, *, lr=1.0):  # type: ignore[no-untyped-def]
        s.q = s.q + 0.0
        return s.q @ g

    options = {"q": {"init": "eye(rows)", "shape": ["rows", "rows"]}}
    traced = rule_of(state=options, name="Begun")(begun)
    parsed = rulec.parse(
        "name: Begun\nhyper: {lr: 1.0}\nstate: {q: {init: eye(rows), shape: [rows, rows]}}\nstep: |\n"
        "  q = q + 0.0\n  direction = q @ g\n"
    )
    assert traced.step_text() == parsed.step_text()
    weights = np.zeros((2, 2))
    opt = rulec.array.Optimizer(rulec.load("accumulate")(parsed).bind(every=2), [weights])
    for _ in range(4):
        opt.step([np.ones((2, 2))])
    np.testing.assert_array_equal(weights, -2 * np.ones((2, 2)))


def test_a_first_value_of_another_shape_is_an_error() -> None:
    text = "name: R\nstate: {m: eye(3)}\nstep: |\n  m = m + g\n  direction = m\n"
    with pytest.raises(RuleError, match="do not fit in 'm': one part has 3 as its rows"):
        rulec.compile(rulec.parse(text, "r.yaml"))
