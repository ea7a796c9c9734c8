"""Estimates of the diagonal of the Hessian, for rules that read it as an input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rulec.errors import HyperError

#: The kinds of random vectors.
DRAWS = ("rademacher", "normal")


def hutchinson(
    loss: Callable[[Any], Any], params: Any, key: Any, *, samples: int = 1, draws: str = "rademacher"
) -> Any:  # fmt: skip
    """Hutchinson's estimate of the diagonal of the Hessian of `loss` at `params`, a tree like theirs.

    It is the mean of z*(Hz) over `samples` random vectors z, of -1 and 1 or normal, from the PRNG `key`. `loss` is a
    function from parameters to one number. The result is an input like `p` of `step` and `update`, as `hessian=...`;
    under `lax.cond` it is computed in some steps alone.

    Raises HyperError for other options.
    """
    if draws not in DRAWS:
        raise HyperError(f"draws={draws!r} of hutchinson is none of {', '.join(DRAWS)}")
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise HyperError(f"samples={samples!r} of hutchinson must be a whole number from 1 on")
    leaves, structure = jax.tree.flatten(params)
    draw = jax.random.rademacher if draws == "rademacher" else jax.random.normal

    def sample(key: Any) -> Any:
        keys = jax.random.split(key, len(leaves))
        vectors = [draw(k, jnp.shape(x), jnp.result_type(x)) for k, x in zip(keys, leaves, strict=True)]
        vector = jax.tree.unflatten(structure, vectors)
        product = jax.jvp(jax.grad(loss), (params,), (vector,))[1]
        return jax.tree.map(jnp.multiply, vector, product)

    if samples == 1:
        return sample(key)
    return jax.tree.map(lambda x: jnp.mean(x, axis=0), jax.lax.map(sample, jax.random.split(key, samples)))
