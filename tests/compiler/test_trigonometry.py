"""Sine, cosine and arc tangent of tensors: how far they are from the exact values, on several backends."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
import torch

import rulec
import rulec.jax
from rulec import math as rm
from rulec.compiler.simplify import LARGEST
from rulec.language.tracing.decorator import rule as rule_of

Array = np.ndarray[Any, Any]

RULE = rulec.parse("""\
name: R
state: {s: 0, c: 0, a: 0}
step: |
  s = 0*s + sin(g)
  c = 0*c + cos(g)
  a = 0*a + atan2(g, p)
  direction = 0*(s + c + a)
""")


def points(dtype: str) -> tuple[Array, Array]:
    """Heights and widths: over the whole range, near quarters of a turn, at the ends of the range, and special ones."""
    random = np.random.default_rng(5)
    quarters = np.pi / 2 * random.integers(-60000, 60000, 300)
    special = [0.0, 1.0, -1.0, 1e-30, np.pi / 4, LARGEST, -LARGEST, 1.0, -3.0, 5e4]
    g = np.concatenate([random.normal(size=500) * 10.0 ** random.uniform(-9, 4, 500), quarters, special])
    p = np.concatenate([random.normal(size=800) * 10.0 ** random.uniform(-9, 4, 800), [0, 0, 0, 1, 1, 1, 1, 1, -3, 0]])
    return g.astype(dtype), p.astype(dtype)


def computed(how: str, g: Array, p: Array) -> dict[str, Array]:
    """The values of the rule's states on a backend."""
    if how == "jax":
        transform = rulec.jax.transform(RULE)
        _, state = jax.jit(transform.update)([g], transform.init([p]), [p])
        return {name: np.asarray(getattr(state, name)[0]) for name in "sca"}
    opt = rulec.array.Optimizer(RULE, [p.copy()], backend=how)
    opt.step([g])
    return {name: opt.state("0")[name] for name in "sca"}


@pytest.mark.parametrize(
    ("how", "dtype"),
    [("numpy", "float32"), ("numpy", "float64"), ("cpu", "float32"), ("c", "float64"), ("jax", "float32")],
)
def test_values_are_within_two_ulps(how: str, dtype: str) -> None:
    g, p = points(dtype)
    x, y = p.astype(np.longdouble), g.astype(np.longdouble)
    exact = {"s": np.sin(y), "c": np.cos(y), "a": np.arctan2(y, x)}
    for name, value in computed(how, g, p).items():
        # In float64, quarters of a turn are known to 1e-31: so near a zero the error is an absolute one.
        floor = 2.0**-26 if dtype == "float64" and name != "a" else 0.0
        size = np.maximum(np.abs(exact[name]), floor)
        with np.errstate(invalid="ignore"):
            ulps = np.abs(value - exact[name]) / (size * np.finfo(dtype).eps)
        assert np.nanmax(ulps) < 2.0, (name, int(np.nanargmax(ulps)))


@pytest.mark.parametrize("how", ["numpy", "c"])
def test_special_values_are_those_of_the_language(how: str) -> None:
    ends = np.array([0.0, 2.0, -2.0, np.inf, -np.inf, np.nan])
    g, p = (x.reshape(-1) for x in np.meshgrid(ends, ends, indexing="ij"))
    with np.errstate(all="ignore"):
        values = computed(how, g, p)
        wanted = rm.atan2(g, p)
    np.testing.assert_allclose(values["a"], wanted, rtol=4e-16)
    np.testing.assert_allclose(wanted, torch.atan2(torch.tensor(g), torch.tensor(p)), rtol=4e-16)
    far = np.array([LARGEST, np.nextafter(LARGEST, np.inf), 1e300, np.inf, -np.inf, np.nan, -1e9])
    values = computed(how, far, np.ones(7))
    assert np.isnan(values["s"]).tolist() == [False, *[True] * 6] == np.isnan(values["c"]).tolist()
    zeros = computed(how, np.array([0.0, -0.0, 0.0]), np.array([-0.0, -0.0, -1.0]))
    assert zeros["a"].tolist() == [0.0, 0.0, math.pi]


def test_python_says_the_same() -> None:
    traced = rule_of(lambda g, p, t: rm.atan2(g, p) * rm.sin(g) + rm.atan(g) * rm.cos(t))
    text = "atan2(g, p)*sin(g) + atan(g)*cos(t)"
    assert traced.step_text() == rulec.parse(f"name: R\nstep: |\n  direction = {text}\n").step_text()
    assert rm.atan(1.0) == rm.atan2(2.0, 2.0) == math.pi / 4
