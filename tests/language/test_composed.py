"""Functions made of operations: NumPy's, SciPy's and torch's values at special points, on several backends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import mpmath
import numpy as np
import pytest
import scipy.special
import torch

import rulec
import rulec.jax
from rulec import math as rm
from rulec.compiler.reference import ReferenceOptimizer
from rulec.language.tracing.decorator import rule as rule_of

Array = np.ndarray[Any, Any]

HALVES = [0.49999999999999994, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -0.3, 4503599627370497.5, 2.0**52 + 1, 1e300, 5e-324]
SPECIAL = np.array([*HALVES, 0.0, -0.0, 1e-3, -20.0, -40.0, -745.0, 30.0, 800.0, math.inf, -math.inf, math.nan])
MATRIX = np.random.default_rng(3).normal(size=(3, 4)) * [[1.0], [3.0], [10.0]]

#: An expression of `g` -> the same by another library, of float64.
PEERS: dict[str, Callable[[Array], Any]] = {
    "round(g)": lambda g: torch.round(torch.from_numpy(g)).numpy(),
    "softplus(g)": lambda g: np.array([float(mpmath.log1p(mpmath.exp(x))) if x == x else x for x in g.reshape(-1)]),
    "median(g)": np.median,
    'quantile(g, 0.3, per="col")': lambda g: np.quantile(g, 0.3, axis=-2),
    "median(g, 1, -0.5*g)": lambda g: np.median([g, np.ones_like(g), -0.5 * g], axis=0),
    "std(g)": lambda g: torch.std(torch.from_numpy(g), correction=0).numpy(),
    'variance(g, per="row")': lambda g: torch.var(torch.from_numpy(g), -1, keepdim=True, correction=0).numpy(),
    'variance(g, per="model")': lambda g: np.var(g),
    'softmax(g, per="row")': lambda g: scipy.special.softmax(g, axis=-1),
    'softmax(g, per="col")': lambda g: scipy.special.softmax(g, axis=-2),
}


def moved(expression: str, g: Array, how: str) -> Array:
    """The value of an expression of the gradient, on a backend, by the reference or by 50 digits."""
    rule = rulec.parse(f"name: R\nhyper: {{lr: 1}}\nstep: |\n  p = 0*p + {expression}\n")
    with np.errstate(all="ignore"):
        if how in ("float64", "mpmath"):
            reference = ReferenceOptimizer(rule, [np.zeros_like(g)], {}, how)
            reference.step([g])
            return np.asarray(reference.params[0], np.float64).reshape(g.shape)
        params = [np.zeros_like(g)]
        rulec.array.Optimizer(rule, params, backend=how).step([g])
    return params[0]


@pytest.mark.parametrize("how", ["float64", "mpmath", "numpy", "cpu", "c"])
@pytest.mark.parametrize("expression", PEERS)
def test_values_are_those_of_other_libraries(expression: str, how: str) -> None:
    elementwise = "per" not in expression and "std" not in expression
    g = SPECIAL if elementwise else MATRIX
    with np.errstate(all="ignore"), mpmath.workdps(40):
        wanted = np.broadcast_to(np.asarray(PEERS[expression](g), np.float64), g.shape)
    np.testing.assert_allclose(moved(expression, g, how), wanted, rtol=6e-16 if elementwise else 1e-14, atol=0)


def test_a_compiled_softplus_keeps_its_small_values() -> None:
    g = np.linspace(-30, 10, 401).astype(np.float32)
    rule = rulec.parse("name: R\nhyper: {lr: 1}\nstep: |\n  p = 0*p - softplus(g)\n")
    transform = rulec.jax.transform(rule)
    updates, _ = jax.jit(transform.update)([g], transform.init([np.zeros_like(g)]), [np.zeros_like(g)])
    wanted = np.logaddexp(0, g.astype(np.float64))
    np.testing.assert_allclose(-np.asarray(updates[0], np.float64), wanted, rtol=5e-7)


def test_python_says_the_same_and_computes_arrays() -> None:
    def composed(g: Any) -> Any:
        ends = rm.median(g) + rm.quantile(g, 0.25, per="row", interpolation="lower")
        return rm.softplus(g) + rm.round(g) * rm.median(g, 2, 1) + rm.std(g) - rm.softmax(g, per="row") + ends

    ends = '(median(g) + quantile(g, 0.25, per="row", interpolation="lower"))'
    text = 'softplus(g) + round(g)*median(g, 2, 1) + std(g) - softmax(g, per="row")'
    text += f' + {ends} + variance(g, per="col")'
    traced = rule_of(lambda g: composed(g) + rm.variance(g, per="col"))
    parsed = rulec.parse(f"name: R\nstep: |\n  direction = {text}\n")
    assert traced.step_text() == parsed.step_text()
    wanted = moved(text, MATRIX, "float64")
    np.testing.assert_allclose(composed(MATRIX) + rm.variance(MATRIX, per="col"), wanted, rtol=1e-14)
