"""Factors of sums that statistics read: where they are taken out, and the values of the sums."""

from __future__ import annotations

import numpy as np
import pytest

import rulec
import rulec.array
from rulec.compiler.ir import Program
from rulec.compiler.layout import layout_for, scheduled
from rulec.compiler.pipeline import compile
from rulec.language.expr.node import Op, walk
from rulec.language.statistics import watched
from rulec.tools.display.kernels import traffic

#: The move of a tensor is a number of the tensor, known after a first stage, times a value of its elements.
SCALED = """name: Scaled
hyper: {lr: 0.5}
state: {m: 0}
step: |
  m = 0.5*m + g
  s = norm(p)/norm(m)
  direction = s*m
"""
LINES = "p = p - lr*s*m", "p = p + lr*s*(m*g)", "p = p - lr*(-(m/s))", "p = p - lr*m", "p = s*m", "p = p - (lr*s*m + g)"

#: A statistic, and the move of the parameter and the gradient to its value.
VALUES = {
    "sum(update*g)": lambda u, g: (u * g).sum(),
    "norm(update)": lambda u, g: np.sqrt((u * u).sum()),
    "mean(-2*update*g/lr)": lambda u, g: (-4 * u * g).mean(),
    'sum(update*g, per="row")': lambda u, g: (u * g).sum(axis=1),
    'mean(update, per="col")': lambda u, g: u.mean(axis=0),
    "max(update*g)": lambda u, g: (u * g).max(),
    'sum(update*g, per="model")': lambda u, g: (u * g).sum(),
    "sum(update)": lambda u, g: u.sum(),
}


def rule_of(line: str) -> rulec.Rule:
    return rulec.parse(SCALED.replace("direction = s*m", line))


def compiled(rule: rulec.Rule, text: str) -> Program:
    return compile(rule, watch=watched(rule, {"x": text}))


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
@pytest.mark.parametrize("line", LINES)
def test_sums_have_their_values_wherever_their_factors_are(line: str, backend: str) -> None:
    rng = np.random.default_rng(3)
    p, g = rng.normal(size=(5, 7)), rng.normal(size=(5, 7))
    watch = {f"x{i}": text for i, text in enumerate(VALUES)}
    optimizer = rulec.array.Optimizer(rule_of(line), [p], backend=backend, watch=watch)
    old = p.copy()
    optimizer.step([g])
    statistics = optimizer.statistics()
    for name, value in zip(watch, VALUES.values(), strict=True):
        (measured,) = statistics[name].values()
        np.testing.assert_allclose(np.ravel(measured), np.ravel(value(p - old, g)), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("line", "text", "early"),
    [
        ("p = p - lr*s*m", "sum(update*g)", True), ("p = p + lr*s*(m*g)", "norm(update)", True),
        ("p = p - lr*(-(m/s))", 'sum(update*g, per="row")', True), ("p = s*m", "sum(update*g)", False),
        ("p = p - (lr*s*m + g)", "sum(update*g)", False), ("p = p - lr*s*m", "max(update*g)", False),
        ("p = p - lr*s*m", 'sum(update*g, per="model")', False),
    ],
)  # fmt: skip
def test_a_sum_is_measured_in_the_stage_that_has_its_operands_without_factors(
    line: str, text: str, early: bool
) -> None:  # fmt: skip
    rule = rule_of(line)
    program = compiled(rule, text)
    measured = [{r.name for r in stage.reduces} & program.measured for stage in program.stages]
    assert list(map(bool, measured)) == [early, not early]
    plain = compile(rule)
    own = [[r for r in stage.reduces if r.name not in program.measured] for stage in program.stages]
    assert own == [[*stage.reduces] for stage in plain.stages]


def test_a_sum_of_the_rule_serves_a_statistic() -> None:
    program = compiled(rule_of("p = p - lr*s*m"), "norm(update)/norm(p)")
    assert not program.measured
    assert [len(stage.reduces) for stage in program.stages] == [2, 0]


@pytest.mark.parametrize("name", ["lamb", "cautious_lamb", "lars", "fromage"])
def test_norms_of_a_step_with_a_trust_ratio_read_no_byte_more(name: str) -> None:
    rule = rulec.load(name).standalone()
    plain, measuring = compile(rule), compile(rule, watch=watched(rule, "norms"))
    layout = layout_for(plain, "float32")
    kernels = [scheduled(program, layout.of(program)) for program in (plain, measuring)]
    assert traffic(*kernels[0]).total == traffic(*kernels[1]).total
    read = [{n.arg for n in walk(kernel.program.stages[-1].roots) if n.op is Op.LOAD} for kernel in kernels]
    assert read[0] == read[1]
