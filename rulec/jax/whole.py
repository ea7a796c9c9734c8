"""Matrix functions of equal matrices on a mesh, where each device works on whole matrices.

A stack of matrices is cut along its batch: two all-to-alls along each axis of the mesh, on the way there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from rulec.language.expr.node import Op


def mesh_of(matrices: Any) -> Any:
    """The mesh of a stack of matrices; None on one device, and inside of `shard_map`."""
    mesh: Any = jax.typeof(matrices).sharding.mesh
    return mesh if mesh.size > 1 and mesh.are_all_axes_auto else None


def pays(op: Op, count: int, sides: Sequence[int], devices: int) -> bool:
    """Whether the busiest device multiplies no more with whole matrices than with its part of every matrix.

    Of an iteration of Newton-Schulz XLA divides the two products with the matrix itself, and repeats the square of its
    Gram matrix on every device. It repeats all of a decomposition.
    """
    short, long = sorted(sides)
    divided, repeated = (2 * long, short) if op is Op.NEWTON_SCHULZ else (0, 1)
    busiest = -(-count // devices)
    return count > 1 and busiest * (divided + repeated) <= count * (divided / devices + repeated)


def by_whole_matrices(function: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """The same function of stacks `(batch, rows, cols)` on a mesh, with every matrix whole on one device."""
    axes = [name for name, size in mesh.shape.items() if size > 1]

    def of_stacks(*operands: Any) -> Any:
        count = len(operands[0])
        moved = [_moved(x, mesh, axes) if getattr(x, "ndim", 0) else x for x in operands]
        result = function(*moved)
        # Back along the same ways.
        for taken in range(len(axes), -1, -1):
            result = _cut(result, mesh, axes, taken)
        return result[:count]

    return of_stacks


def _moved(stack: Any, mesh: Any, axes: Sequence[str]) -> Any:
    """A stack cut along its batch over all axes of a mesh; zeros fill it up."""
    missing = -len(stack) % mesh.size
    stack = jnp.pad(stack, ((0, missing), (0, 0), (0, 0))) if missing else stack
    for taken in range(len(axes) + 1):
        stack = _cut(stack, mesh, axes, taken)
    return stack


def _cut(stack: Any, mesh: Any, axes: Sequence[str], taken: int) -> Any:
    """A stack whose batch is cut over the last axes of a mesh; XLA chooses how rows and columns lie on the others.

    One axis at a time, the innermost first: XLA gathers the whole stack where it has to move several at once.
    """
    others = PartitionSpec.UNCONSTRAINED if taken < len(axes) else None
    batch = tuple(axes[::-1][:taken]) or None
    spec = PartitionSpec(batch, others, others)  # type: ignore[no-untyped-call]
    return jax.lax.with_sharding_constraint(stack, NamedSharding(mesh, spec))  # type: ignore[no-untyped-call]
