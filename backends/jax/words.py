"""Functions of one array for the code of the jax backend: jnp lacks them or computes them badly.

Those of `FORMULAS` stand for the language's functions of their names, in printed files with their text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def log1p(x: Any) -> Any:
    """log(1 + x) from the logarithm of the sum, rounded, and what was lost, over it: jnp's has 127 ulps in float64."""
    import jax.numpy as jnp

    total = rounded(jnp.add(x, 1.0))
    lost = jnp.where(jnp.abs(x) < 1.0, x - rounded(total - 1.0), 1.0 - rounded(total - x))
    whole = jnp.log(total)
    near = jnp.where((total == 0.0) | (total == jnp.inf), whole, whole + lost / total)
    return jnp.where(total == 1.0, x, near)


def expm1(x: Any) -> Any:
    """exp(x) - 1 by Kahan's formula: jnp's has 5 ulps in float32."""
    import jax.numpy as jnp

    power = rounded(jnp.exp(x))
    grown = (power - 1.0) * x / jnp.log(power)
    grown = jnp.where(x > 40.0, power, jnp.where(x < -40.0, -1.0, grown))
    return jnp.where(power == 1.0, x, grown)


#: Formulas in place of functions of jnp.
FORMULAS: Mapping[str, Callable[..., Any]] = {"log1p": log1p, "expm1": expm1}
