"""A short training of a small tree, by any transformation of optax's kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

PARAMS = {
    "a": np.linspace(-1, 2, 12, dtype=np.float32).reshape(3, 4),
    "b": {"c": np.linspace(1, 3, 5, dtype=np.float32)},
}


def params(dtype: Any = jnp.float32) -> Any:
    """The parameters in new arrays."""
    return jax.tree.map(lambda x: jnp.array(x, dtype), PARAMS)


def gradients(tree: Any, step: Any) -> Any:
    """Gradients of the dtypes of the parameters, none of them near zero."""
    return jax.tree.map(lambda x: (1.5 + jnp.sin(3 * x.astype(jnp.float32) + step)).astype(x.dtype), tree)


def trained(transformation: Any, tree: Any, steps: int = 4) -> tuple[Any, Any]:
    """New parameters and the last state, after steps in one scan under jit."""

    def body(carry: Any, step: Any) -> Any:
        now, state = carry
        updates, state = transformation.update(gradients(now, step), state, now)
        return (optax.apply_updates(now, updates), state), None

    @jax.jit
    def run(tree: Any) -> Any:
        return jax.lax.scan(body, (tree, transformation.init(tree)), jnp.arange(steps))[0]

    found: tuple[Any, Any] = run(tree)
    return found


def difference(found: Any, expected: Any, before: Any = None) -> float:
    """The largest difference of two trees, relative to the largest number of each leaf, or of its change."""
    worst = 0.0
    for x, y, z in zip(*map(jax.tree.leaves, (found, expected, expected if before is None else before)), strict=True):
        x, y, z = (np.asarray(array, np.float64) for array in (x, y, z))
        scale = np.abs(y if before is None else y - z).max(initial=0.0)
        worst = max(worst, float(np.abs(x - y).max(initial=0.0) / scale) if scale else float(np.abs(x).max(initial=0)))
    return worst


def structure(tree: Any) -> Any:
    """The containers of a tree."""
    return jax.tree.structure(tree)


@contextmanager
def check_compiles_nothing(log: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails where JAX compiles or traces anything inside of it."""
    log.clear()
    with jax.log_compiles():
        yield
    made = [record.getMessage() for record in log.records if record.getMessage().startswith(("Compiling", "Finished"))]
    log.clear()
    assert not made, made
