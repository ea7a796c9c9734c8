"""Second moments of rows, for rules that read them as inputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rulec.errors import TensorError


def covariance(rows: jax.Array, scale: float = 1.0) -> jax.Array:
    """The mean of x x^T over the rows x of an array (..., n): a matrix (n, n), of float32, or of float64 for float64.

    For `a` of a layer the rows are its inputs. For `b` they are the cotangents of its outputs; where the loss is a mean
    over `count` terms, `scale=count` makes them the gradients of single terms. TensorError for a number.
    """
    if jnp.ndim(rows) < 1:
        raise TensorError("covariance takes an array of rows, and this is one number")
    wide = jnp.asarray(rows).astype(jnp.promote_types(jnp.result_type(rows), jnp.float32))
    flat = wide.reshape(-1, wide.shape[-1]) * scale
    return jnp.matmul(flat.T, flat, precision="highest") / max(len(flat), 1)
