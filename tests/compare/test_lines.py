"""Lines kept in states: the rule computes what it did, and every line is seen."""

from __future__ import annotations

import numpy as np
import pytest

import rulec
from rulec.runtime.engine import default_hyper
from rulec.tools.compare.difference import Trial
from rulec.tools.compare.lines import keep_lines, trace
from rulec.tools.compare.sides import ReferenceSide
from tests.library import by_kind


@pytest.mark.parametrize("name", by_kind(n for n in rulec.rules() if not n.startswith("transforms/")))
def test_keeping_lines_changes_nothing(name: str) -> None:
    rule = rulec.load(name).standalone()
    hyper, trial = default_hyper(rule, {}), Trial("float64", 3, ((5, 6),))
    kept = keep_lines(rule, (5, 6))
    plain, traced = (ReferenceSide(r, trial.params, hyper) for r in (rule, kept.rule))
    for grads, inputs in zip(trial.gradients(), trial.inputs(rule), strict=True):
        plain.step(grads, inputs)
        traced.step(grads, inputs)
    for key, value in plain.values()[0].items():
        np.testing.assert_array_equal(traced.values()[0][key], value)


def test_every_line_that_runs_is_kept_and_the_other_branch_is_not() -> None:
    rule = rulec.parse(
        "name: Two\nhyper: {lr: 1}\nstep: |\n"
        "  if ndim >= 2:\n    a = g*2\n  else:\n    a = g*3\n  scale = 1/(1 + t)\n  direction = a*scale\n"
    )
    matrix, vector = keep_lines(rule, (2, 2)), keep_lines(rule, (2,))
    assert matrix.lines[0].text == "a = g*2"
    assert vector.lines[0].text == "a = g*3"
    assert [(line.target, line.narrow) for line in vector.lines] == [
        ("a", False), ("scale", True), ("direction", False), ("p", False),
    ]  # fmt: skip


def test_a_name_assigned_twice_is_shown_twice() -> None:
    rule = rulec.parse("name: Twice\nhyper: {lr: 1}\nstep: |\n  d = g*2\n  d = d + 1\n  direction = d\n")
    kept = keep_lines(rule, (2,))
    (step,) = trace(kept, {"lr": 1.0}, np.zeros(2), [np.array([1.0, 3.0])], "cpu")
    values = {v.line.text: v.reference.tolist() for v in step.values}
    assert values["d = g*2"] == [2.0, 6.0]
    assert values["d = d + 1"] == [3.0, 7.0]
    assert values["p = p - lr*direction"] == [-3.0, -7.0]
    assert all(v.ulps("float64") == 0 for v in step.values)


def test_states_of_the_rule_that_look_like_ours_are_kept_apart() -> None:
    rule = rulec.parse(
        "name: Line\nhyper: {lr: 1}\nstate: {line0: 0}\nstep: |\n  line0 = line0 + g\n  direction = line0\n"
    )
    kept = keep_lines(rule, (2,))
    assert len({line.state for line in kept.lines} | {"line0"}) == len(kept.lines) + 1
    *_, last = trace(kept, {"lr": 1.0}, np.zeros(2), [np.ones(2), np.ones(2)], None)
    assert last.values[0].reference.tolist() == [2.0, 2.0]
    assert last.values[0].backend is None
    assert last.values[0].ulps("float64") is None


def test_a_low_rank_value_has_its_own_shape() -> None:
    rule = rulec.parse("name: Gram\nhyper: {lr: 1}\nstep: |\n  gram = g @ transpose(g)\n  direction = gram @ g\n")
    kept = keep_lines(rule, (2, 3))
    gradient = np.arange(6.0).reshape(2, 3)
    (step,) = trace(kept, {"lr": 1.0}, np.zeros((2, 3)), [gradient], None)
    np.testing.assert_array_equal(step.values[0].reference.reshape(2, 2), gradient @ gradient.T)


def test_a_line_of_a_branch_keeps_the_shape_of_what_it_assigns() -> None:
    rule = rulec.parse(
        "name: Seldom\nhyper: {lr: 1, every: 2}\nstate: {q: {init: 0, shape: [rows, rows]}}\nstep: |\n"
        "  if t % every == 1:\n    if every > 1:\n      q = g @ transpose(g)\n  direction = q @ g\n"
    )
    kept = keep_lines(rule, (2, 3))
    gradient = np.arange(6.0).reshape(2, 3)
    first, second = trace(kept, {"lr": 1.0}, np.zeros((2, 3)), [gradient, 2 * gradient], "numpy")
    for step in (first, second):
        for side in (step.values[0].reference, step.values[0].backend):
            assert side is not None
            np.testing.assert_array_equal(side.reshape(2, 2), gradient @ gradient.T)
