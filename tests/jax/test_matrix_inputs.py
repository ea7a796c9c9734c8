"""Inputs that are a matrix for each leaf, with a shape of its own: in JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rulec
import rulec.jax
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import TensorError

WHITENED = rulec.parse("""
name: Whitened
hyper: {damping: 0.5}
inputs: {a: {shape: [cols, cols]}}
state: {m: 0}
applies_to: ndim >= 2
otherwise: sgd
step: |
  m = 0.5*m + g
  direction = transpose(solve(a + damping*eye(cols), transpose(m)))
""")

RNG = np.random.default_rng(3)
START = {"w": RNG.normal(size=(4, 3)), "b": RNG.normal(size=5)}
GRADS = [{key: RNG.normal(size=x.shape) for key, x in START.items()} for _ in range(2)]
MATRICES = [x.T @ x for x in RNG.normal(size=(2, 6, 3))]


def wanted() -> dict[str, Any]:
    reference = ReferenceOptimizer(WHITENED, [x.copy() for x in START.values()], {"lr": 0.1})
    for grads, matrix in zip(GRADS, MATRICES, strict=True):
        reference.step([*grads.values()], inputs={"a": [matrix, None]})
    return dict(zip(START, reference.params, strict=True))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("absent", [{}, {"b": None}])
def test_steps_and_updates_are_the_reference_s(jitted: bool, absent: Any) -> None:
    with jax.enable_x64(True):
        tree = other = jax.tree.map(jnp.asarray, START)
        state = rulec.jax.init(WHITENED, tree)
        made = rulec.jax.transform(WHITENED, lr=0.1)
        moments, update = made.init(other), jax.jit(made.update) if jitted else made.update

        def step(tree: Any, grads: Any, state: Any, a: Any) -> Any:
            return rulec.jax.step(WHITENED, tree, grads, state, lr=0.1, a=a, donate=False)

        for grads, matrix in zip(GRADS, MATRICES, strict=True):
            a = {"w": jnp.asarray(matrix), **absent}
            tree, state = (jax.jit(step) if jitted else step)(tree, jax.tree.map(jnp.asarray, grads), state, a)
            updates, moments = update(jax.tree.map(jnp.asarray, grads), moments, other, a=a)
            other = jax.tree.map(jnp.add, other, updates)
        for key, value in wanted().items():
            np.testing.assert_allclose(tree[key], value, rtol=1e-12)
            np.testing.assert_allclose(other[key], value, rtol=1e-12)


@pytest.mark.parametrize(
    ("a", "message"),
    [
        ({"b": 1.0}, r"the input a of w is missing: the rule of this parameter needs a matrix of shape \(3, 3\)"),
        ({"w": np.ones((4, 4))}, r"the input a of w has shape \(4, 4\), where \(3, 3\) is expected"),
        ({"w": np.ones((3, 3), np.int32)}, "the input a of w is of int32, where float32 is expected"),
        ({"w": np.ones((3, 3)), "x": 1.0}, "the input a of x is given, and there is no such parameter"),
    ],
)
def test_what_does_not_fit_is_refused(a: Any, message: str) -> None:
    tree = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), START)
    with pytest.raises(TensorError, match=message):
        rulec.jax.step(WHITENED, tree, tree, rulec.jax.init(WHITENED, tree), a=a)
