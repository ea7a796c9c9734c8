"""Steps on meshes of explicit axes, where JAX refuses what types alone do not say how to shard, such as products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def automatic(function: Callable[..., Any], operands: Any, specs: Any) -> Any:
    """What the function gives of its operands, XLA choosing how values are sharded inside of it, as on other meshes.

    `operands` is a tuple of trees, and `specs` says of each array of the result how it comes out.
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
    made = jax.sharding.auto_axes(inside, axes=mesh.explicit_axes, out_sharding=shardings)
    return made([x for x in leaves if isinstance(x, jax.Array)])


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
