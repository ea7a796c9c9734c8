"""Functions of one array that jnp computes badly, for the code that the jax backend prints."""

from __future__ import annotations

from typing import Any

import numpy as np


def cbrt(x: Any) -> Any:
    """The cube root, with the sign of `x`; zero where `x` is subnormal, for which XLA may find the wrong sign."""
    import jax.numpy as jnp

    return jnp.where(jnp.abs(x) < np.finfo(x.dtype).tiny, 0.0 * x, jnp.cbrt(x))
