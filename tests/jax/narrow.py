"""Trees of drawn arrays, and whether two trees have the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def drawn(seed: int, shapes: Mapping[str, tuple[int, ...]], dtype: Any = jnp.float32) -> dict[str, Any]:
    """Normal numbers in arrays of these shapes, rounded to a dtype."""
    numbers = np.random.default_rng(seed)
    return {
        name: jnp.asarray(numbers.standard_normal(shape), jnp.float32).astype(dtype) for name, shape in shapes.items()
    }


def same(ours: Any, theirs: Any) -> bool:
    """Whether two trees have one structure, and all their arrays the same bits."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    alike = jax.tree.structure(ours) == jax.tree.structure(theirs)
    return alike and all(a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
