"""Rules that round to a grid by adding a large number and taking it away again: XLA would leave both out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rulec
import rulec.jax
from tests.standalone.one_file import Case, check_ran

#: Bodies that give `m` as the gradient rounded to sixteenths; `{large}` is 1.5 times the first number without halves.
BODIES = [
    "m = ((g*16 + large) - large)/16",
    "m = (({large} + g*16) - {large})/16",
    "m = ((g*16 - large) + large)/16",
    "x = large - g*16\n  m = (large - x)/16",
    "x = g*16 + {large}\n  y = x - {large}\n  m = y/16 + 0*x",
    "m = (((g*16 + large) - {large} + 3) - 3)/16",
]

LARGE = {"float32": 1.5 * 2.0**23, "float64": 1.5 * 2.0**52}


def rule_of(body: str, dtype: str) -> rulec.Rule:
    large = repr(LARGE[dtype])
    body = body.replace("{large}", large)
    return rulec.parse(
        f"name: Grid\nhyper: {{lr: 1, large: {large}}}\nstate: {{m: 0}}\nstep: |\n  {body}\n  direction = m\n"
    )


@pytest.mark.parametrize(("dtype", "body"), [*(("float32", body) for body in BODIES), ("float64", BODIES[1])])
def test_sums_are_rounded_as_ieee_rounds_them(dtype: str, body: str) -> None:
    rule, gradient = rule_of(body, dtype), np.random.default_rng(0).normal(size=100).astype(dtype)
    expected = -np.rint(gradient * 16) / 16
    with jax.enable_x64(dtype == "float64"):
        zeros, g = jnp.zeros(100, dtype), jnp.asarray(gradient)
        state = rulec.jax.init(rule, zeros)
        found, _ = rulec.jax.step(rule, zeros, g, state, backend="jax", donate=False)
        np.testing.assert_array_equal(found, expected)
        made: Any = rulec.jax.transform(rule)
        updates, _ = jax.jit(made.update)(g, state, zeros)
        np.testing.assert_array_equal(updates, expected)


def test_xla_by_itself_does_not_round() -> None:
    """Otherwise the rest shows nothing."""
    large = LARGE["float32"]
    found = jax.jit(lambda g: ((g * 16 + large) - large) / 16)(jnp.asarray([0.34], jnp.float32))
    assert float(found[0]) == np.float32(0.34)


JAX = """
import jax
import jax.numpy as jnp
import rule
init, update = rule.rule()
tree = [jnp.asarray(p) for p in params]
leave(jax.jit(update)([jnp.asarray(g) for g in steps[0]], init(tree), tree)[0])
"""


@pytest.mark.slow
def test_so_are_those_of_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    large = repr(LARGE["float32"])
    path.write_text(
        f"name: Grid\nsummary: Sixteenths.\nhyper: {{lr: 1}}\nstep: |\n  direction = ((g*16 + {large}) - {large})/16\n"
    )
    gradients = [np.random.default_rng(1).normal(size=size).astype(np.float32) for size in (1, 100)]
    (found,) = check_ran(tmp_path, "jax", JAX, Case(str(path), [np.zeros_like(g) for g in gradients], [gradients]))
    for update, gradient in zip(found, gradients, strict=True):
        np.testing.assert_array_equal(update, -np.rint(gradient * 16) / 16)
