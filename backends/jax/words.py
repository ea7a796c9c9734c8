"""Functions of one array that jnp lacks or computes badly, for the code that the jax backend prints."""

from __future__ import annotations

from typing import Any

import numpy as np


def cbrt(x: Any) -> Any:
    """The cube root, with the sign of `x`; zero where `x` is subnormal, for which XLA may find the wrong sign."""
    import jax.numpy as jnp

    return jnp.where(jnp.abs(x) < np.finfo(x.dtype).tiny, 0.0 * x, jnp.cbrt(x))


def rounded(x: Any) -> Any:
    """`x` as it is, rounded to its dtype before XLA adds anything more."""
    import jax

    return jax.lax.reduce_precision(x, np.finfo(x.dtype).nexp, np.finfo(x.dtype).nmant)
