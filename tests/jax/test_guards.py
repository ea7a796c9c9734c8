"""Matrix functions that a rule wants at some steps alone are worked out at these."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rulec
import rulec.array
import rulec.jax
from rulec.compiler.pipeline import compile
from rulec.functional.plan import guards_of
from rulec.language.expr.node import Op

#: Square: the basis of a covariance of low rank is anybody's choice.
SHAPES = {"a": (5, 5), "b": (4, 4)}


def drawn(random: np.random.Generator) -> dict[str, Any]:
    return {name: random.standard_normal(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("rule", "hyper"),
    [
        ("galore", {"gap": 3, "rank": 2}),
        pytest.param("shampoo", {"every": 3, "eps": 1e-3}, marks=pytest.mark.slow),
        pytest.param("soap", {"every": 3}, marks=pytest.mark.slow),
    ],
)
def test_steps_with_and_without_them_are_those_of_numpy(rule: str, hyper: dict[str, float]) -> None:
    random = np.random.default_rng(3)
    ours = drawn(random)
    theirs = {name: array.copy() for name, array in ours.items()}
    optimizer = rulec.array.Optimizer(rule, theirs, backend="numpy", **hyper)
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.array, ours)
        state = rulec.jax.init(rule, params, **hyper)
        for _ in range(7):
            grads = drawn(random)
            optimizer.step(grads)
            params, state = rulec.jax.step(rule, params, jax.tree.map(jnp.array, grads), state, **hyper)
    for name, array in theirs.items():
        np.testing.assert_allclose(params[name], array, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("rule", ["galore", "shampoo", "soap"])
def test_decompositions_are_inside_of_conditional_code(rule: str) -> None:
    params = {"a": jnp.ones((6, 4))}
    state = rulec.jax.init(rule, params)
    lowered = jax.jit(lambda p, s: rulec.jax.step(rule, p, p, s)).lower(params, state).as_text()
    outside = re.sub(r'"stablehlo\.case".*?\n    \}\) :', "", lowered, flags=re.DOTALL)
    assert "stablehlo.case" in lowered
    assert re.search(r"lapack|svd|qr\b|eigh", lowered, re.IGNORECASE) is not None
    main = outside[outside.index("@main") :]
    main = main[: main.index("\n  }")]
    assert re.search(r"lapack|@\w*(svd|qr|eigh)", main, re.IGNORECASE) is None


def test_a_value_that_is_wanted_otherwise_too_has_no_guard() -> None:
    rule = rulec.parse(
        "name: R\nstate: {q: {init: 0, shape: [rows, rows]}}\nstep: |\n"
        "  b = qr(g @ transpose(g))\n  if t % 5 == 0:\n    q = b\n  direction = q @ b @ g\n"
    )
    assert guards_of(compile(rule)) == {}


def test_arms_are_told_apart() -> None:
    rule = rulec.parse(
        "name: R\nstate: {q: {init: 0, shape: [rows, rows]}}\nstep: |\n  if t == 1:\n    q = eigh(g @ transpose(g))\n"
        "  else:\n    q = qr(g @ transpose(g) @ q)\n  direction = q @ g\n"
    )
    found = guards_of(compile(rule))
    truths = {value.op: guard.truth for value, guard in found.items()}
    assert truths[Op.EIGH] is True
    assert truths[Op.QR] is False
    # The product is wanted in both arms, so always.
    assert sum(value.op is Op.MATMUL for value in found) == 1


def test_a_quantile_in_a_branch_is_that_of_numpy() -> None:
    rule = rulec.parse(
        "name: R\nstate: {q: {init: 0, per: tensor}, r: {init: 0, per: row}}\nstep: |\n  if t % 2 == 0:\n"
        '    q = maximum(median(g), -9)\n    r = minimum(median(g, per="row"), 9)\n  direction = q + r\n'
    )
    ours = drawn(np.random.default_rng(4))
    theirs = {name: array.copy() for name, array in ours.items()}
    optimizer = rulec.array.Optimizer(rule, theirs, backend="numpy")
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.array, ours)
        state = rulec.jax.init(rule, params)
        for _ in range(2):
            optimizer.step(ours)
            params, state = rulec.jax.step(rule, params, jax.tree.map(jnp.array, ours), state)
    for name, array in theirs.items():
        np.testing.assert_allclose(params[name], array, rtol=1e-12)
