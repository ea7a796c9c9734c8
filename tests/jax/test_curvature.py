"""Diagonals of the Hessian in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rulec
import rulec.jax
from rulec.errors import HyperError


def test_signs_give_the_diagonal_where_there_is_nothing_else() -> None:
    with jax.enable_x64(True):
        params = {"a": jnp.arange(1.0, 4.0), "b": jnp.full((2, 2), 0.5)}
        diagonal = rulec.jax.hutchinson(
            lambda tree: sum(jnp.sum(x**4) for x in tree.values()), params, jax.random.key(0)
        )
        for name, x in params.items():
            np.testing.assert_allclose(diagonal[name], 12 * x**2, rtol=1e-14)


@pytest.mark.parametrize("draws", ["rademacher", "normal"])
def test_many_samples_come_near_the_diagonal(draws: str) -> None:
    matrix = jax.random.normal(jax.random.key(1), (6, 6))
    exact = jnp.diag(matrix.T @ matrix)
    estimate = rulec.jax.hutchinson(
        lambda x: jnp.sum((matrix @ x) ** 2) / 2, jnp.ones(6), jax.random.key(0), samples=3000, draws=draws
    )
    assert float(jnp.abs(estimate - exact).max() / exact.max()) < 0.15


def test_a_step_takes_it_under_a_condition() -> None:
    """The diagonal is computed in every second step: a branch of XLA around the estimate."""
    rule = rulec.parse("""
name: Newton
state: {h: 1}
inputs: {hessian: like p}
step: |
  if t % 2 == 1:
    h = hessian
  direction = g/h
""")

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(x**4)

    @jax.jit
    def step(x: jax.Array, state: object, t: jax.Array, key: jax.Array) -> tuple[jax.Array, object]:
        diagonal = jax.lax.cond(
            t % 2 == 0, lambda: rulec.jax.hutchinson(loss, x, key), lambda: jnp.full_like(x, jnp.nan)
        )
        x, state = rulec.jax.step(rule, x, jax.grad(loss)(x), state, hessian=diagonal, lr=1.0)
        return x, state

    x = jnp.array([1.0, -2.0])
    state = rulec.jax.init(rule, x)
    expected = np.asarray(x, np.float64)
    for t in range(4):
        h = 12 * expected**2 if t % 2 == 0 else h  # noqa: F821
        expected = expected - 4 * expected**3 / h
        x, state = step(x, state, jnp.asarray(t), jax.random.key(t))
        np.testing.assert_allclose(x, expected, rtol=1e-5)


def test_mistakes_have_one_sentence() -> None:
    with pytest.raises(HyperError, match="draws='signs' of hutchinson is none of rademacher, normal"):
        rulec.jax.hutchinson(jnp.sum, jnp.ones(2), jax.random.key(0), draws="signs")
    with pytest.raises(HyperError, match="samples=0 of hutchinson must be a whole number from 1 on"):
        rulec.jax.hutchinson(jnp.sum, jnp.ones(2), jax.random.key(0), samples=0)
