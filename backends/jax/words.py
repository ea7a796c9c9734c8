"""Functions of one array for the code of the jax backend: jnp lacks them or computes them badly."""

from __future__ import annotations

from typing import Any

import numpy as np


def cbrt(x: Any) -> Any:
    """The cube root, with the sign of `x`; zero for a subnormal `x`, as XLA may give it the wrong sign."""
    import jax.numpy as jnp

    return jnp.where(jnp.abs(x) < np.finfo(x.dtype).tiny, 0.0 * x, jnp.cbrt(x))


def rounded(x: Any) -> Any:
    """`x`, rounded to its dtype before XLA adds another number."""
    import jax

    return jax.lax.reduce_precision(x, np.finfo(x.dtype).nexp, np.finfo(x.dtype).nmant)
