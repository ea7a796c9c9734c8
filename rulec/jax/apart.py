"""The arrays of a step as other values for XLA, of which it computes the statistics apart from the step."""

from __future__ import annotations

from typing import Any

import jax

from rulec.functional.quantized import Coded, Unbiased
from rulec.jax.packing import unpiece


def apart(tree: Any) -> Any:
    """The same arrays as other values for XLA, so that no computation is shared with the arrays of the tree."""
    whole = jax.tree.map(unpiece, tree, is_leaf=lambda x: isinstance(x, Coded | Unbiased))
    structure: Any
    leaves, structure = jax.tree.flatten(whole)
    arrays = iter(jax.lax.optimization_barrier([x for x in leaves if isinstance(x, jax.Array)]))  # type: ignore[no-untyped-call]
    return structure.unflatten([next(arrays) if isinstance(x, jax.Array) else x for x in leaves])
