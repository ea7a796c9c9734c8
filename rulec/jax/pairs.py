"""Complex arrays as pairs of reals, which rules update each by itself, as torch's optimizers do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

#: dtype of the real and imaginary parts -> complex dtype.
COMPLEX = {"float32": "complex64", "float64": "complex128"}


def paired(array: Any) -> Any:
    """A complex array as reals, with a last axis of the real and the imaginary part; a real array as it is."""
    return jnp.stack([jnp.real(array), jnp.imag(array)], axis=-1) if jnp.iscomplexobj(array) else array


def unpaired(array: Any) -> Any:
    """The inverse; pairs whose dtype has no complex counterpart stay pairs."""
    return jax.lax.complex(array[..., 0], array[..., 1]) if str(array.dtype) in COMPLEX else array
