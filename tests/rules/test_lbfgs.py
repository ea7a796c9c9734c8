"""The direction of L-BFGS on a function, beside optax's: gradients that belong to no function have no Hessian."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rulec

pytestmark = pytest.mark.peer

SHAPES = ((3,), (2, 2), ())


def loss(params: Any) -> Any:
    """A convex function that is not quadratic, of parameters of very different curvatures."""
    x = jnp.concatenate([jnp.ravel(p) for p in params])
    scale = jnp.asarray(np.logspace(0, 1.5, x.size), x.dtype)
    return jnp.sum(scale * (x - 1) ** 2) + 0.1 * jnp.sum(x**4) + 0.3 * jnp.sum(x) ** 2


def start(dtype: str) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return [np.asarray(rng.normal(size=shape), dtype) for shape in SHAPES]


def ours(backend: str, dtype: str, steps: int, memory: int, lr: float) -> list[np.ndarray[Any, Any]]:
    params = start(dtype)
    optimizer = rulec.array.Optimizer("lbfgs_direction", params, backend, memory=memory, lr=lr)
    for _ in range(steps):
        optimizer.step([np.asarray(g) for g in jax.grad(loss)([jnp.asarray(p) for p in params])])
    return params


@pytest.mark.parametrize("memory", [1, 3])
def test_float64(memory: int) -> None:
    with jax.enable_x64(True):
        tx = optax.chain(optax.scale_by_lbfgs(memory), optax.scale(-0.5))
        params: Any = [jnp.asarray(p) for p in start("float64")]
        state = tx.init(params)
        for _ in range(12):
            updates, state = tx.update(jax.grad(loss)(params), state, params)
            params = optax.apply_updates(params, updates)
        for mine, theirs in zip(ours("numpy", "float64", 12, memory, 0.5), params, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)


def test_float32_finds_the_minimum() -> None:
    with jax.enable_x64(True):
        far = ours("numpy", "float64", 60, 4, 0.5)
        near = ours("numpy", "float32", 60, 4, 0.5)
        ends = [np.ravel(g) for g in jax.grad(loss)([jnp.asarray(p) for p in far])]
        assert np.abs(np.concatenate(ends)).max() < 1e-6
    for a, b in zip(far, near, strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5)
