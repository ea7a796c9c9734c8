"""Steps on meshes of explicit axes. JAX refuses operations there whose sharding types do not tell, such as products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def automatic(function: Callable[..., Any], operands: Any, specs: Any) -> Any:
    """The function's result; inside, XLA chooses how values are sharded, as on other meshes.

    `operands` is a tuple of trees, and `specs` is the sharding of each array of the result.
    """
    structure: Any
    leaves, structure = jax.tree.flatten(operands)
    mesh = _explicit(leaves)
    if mesh is None:
        return function(*operands)

    def inside(arrays: Any) -> Any:
        rest = iter(arrays)
        return function(*structure.unflatten(next(rest) if isinstance(x, jax.Array) else x for x in leaves))

    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    sharded = jax.sharding.auto_axes(inside, axes=mesh.explicit_axes, out_sharding=shardings)
    return sharded([x for x in leaves if isinstance(x, jax.Array)])


def _explicit(leaves: Any) -> Any:
    """The mesh of explicit axes that arrays lie on; None where there is none."""
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            mesh: Any = jax.typeof(leaf).sharding.mesh
            if mesh.explicit_axes:
                return mesh
    return None


def specs_of(tree: Any) -> Any:
    """How each array of a tree is sharded."""
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)
