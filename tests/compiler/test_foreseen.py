"""Functions of values known before a step, in float64 and of any size: their values in a schedule."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

import rulec
import rulec.jax
from rulec import math as rm
from rulec.compiler.reference import ReferenceOptimizer
from rulec.language.tracing.decorator import rule as rule_of

SCHEDULE = "name: R\nhyper: {lr: 1}\nstep: |\n  direction = 0.5*(1 + cos(pi*minimum(t - 1, 5)/5))*g\n"


def moved(how: str) -> list[float]:
    """How far seven steps go with a gradient of one."""
    rule, grad = rulec.parse(SCHEDULE), np.ones(1)
    params = [np.zeros(1)]
    points = []
    if how == "jax":
        with jax.enable_x64(True):
            transform = rulec.jax.transform(rule)
            update, state = jax.jit(transform.update), transform.init(params)
            for _ in range(7):
                updates, state = update([grad], state, params)
                params = optax.apply_updates(params, updates)
                points.append(float(params[0][0]))
        return points
    opt: Any = ReferenceOptimizer(rule, params, {}, how) if how == "mpmath" else None
    opt = opt or rulec.array.Optimizer(rule, params, backend=how)
    for _ in range(7):
        opt.step([grad])
        points.append(float(opt.params[0][0] if how == "mpmath" else params[0][0]))
    return points


@pytest.mark.parametrize("how", ["mpmath", "numpy", "cpu", "c", "jax"])
def test_a_schedule_in_a_rule_is_optaxs(how: str) -> None:
    schedule = optax.cosine_decay_schedule(1.0, 5)
    wanted = -np.cumsum([float(schedule(count)) for count in range(7)])
    found = moved(how)
    np.testing.assert_allclose(found, wanted, rtol=3e-7)
    exact = -np.cumsum([0.5 * (1 + np.cos(np.pi * min(count, 5) / 5)) for count in range(7)])
    np.testing.assert_allclose(found, exact, rtol=1e-14)


def test_python_says_the_same() -> None:
    traced = rule_of(lambda g, t: g * rm.cos(t) + rm.sin(t / 2))
    assert traced.step_text() == rulec.parse("name: R\nstep: |\n  direction = g*cos(t) + sin(t/2)\n").step_text()
    assert rm.cos(0.5) == np.cos(0.5)
