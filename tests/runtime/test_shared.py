"""The step counts of groups and of the model."""

from __future__ import annotations

import numpy as np
import pytest

import rulec
from rulec.array import Optimizer
from rulec.compiler.reference import ReferenceOptimizer
from rulec.language.rule import Rule

OF_GROUPS = """
name: Late
state: {a: {init: 0, per: group}}
step: |
  if t % 2 == 0:
    a = where(t == 2, sum(g*g, per="group"), a + t)
  direction = a*g
"""


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
@pytest.mark.parametrize("rule", [rulec.load("accumulate(dog)"), rulec.parse(OF_GROUPS)], ids=["the model", "a group"])
def test_steps_count_whatever_arm_of_a_branch_they_take(rule: Rule, backend: str) -> None:
    """DoG takes its first distance at its first own step, which is the fourth of the model."""
    random = np.random.default_rng(0)
    params = [random.normal(size=shape) for shape in ((6, 5), (4,))]
    ours = [param.copy() for param in params]
    reference, optimizer = ReferenceOptimizer(rule, params), Optimizer(rule, ours, backend=backend)
    for _ in range(6):
        gradients = [random.normal(size=param.shape) for param in params]
        reference.step(gradients)
        optimizer.step(gradients)
        for one, wanted in zip(ours, reference.params, strict=True):
            np.testing.assert_allclose(one, wanted, rtol=1e-14)
    assert not np.array_equal(ours[0], params[0])
