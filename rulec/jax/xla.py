"""What a step asks of XLA: options for its compiled calls, traced and known values, meshes of explicit axes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from rulec.errors import RuleError

#: That XLA, where it wants to write over an array that others read, looks for an order in which that does no harm:
#: without it XLA on the CPU copies the array first.
_OPTIONS = {"xla_cpu_copy_insertion_use_region_analysis": True}


@functools.cache
def compiler_options() -> dict[str, Any] | None:
    """The options of an outermost jit; None where this XLA has none of them."""
    if jax.default_backend() != "cpu":
        return None
    try:
        # Also where a transformation is first used while others trace it.
        with jax.ensure_compile_time_eval():
            jax.jit(lambda x: x + 1, compiler_options=_OPTIONS)(0.0)
    except jax.errors.JaxRuntimeError:
        return None
    return _OPTIONS


def is_outermost(*operands: Any) -> bool:
    """Whether a call with these operands is compiled on its own: JAX takes options there alone."""
    return not any(map(is_traced, jax.tree.leaves((operands, _new_here()))))


@jax.jit
def _new_here() -> Any:
    """An array that is a tracer exactly where this call is traced by another jit; the cheapest such array."""
    return jnp.zeros(())


def is_traced(value: Any) -> bool:
    """Whether a value is a tracer of JAX: unknown while a step is traced."""
    return isinstance(value, jax.core.Tracer)


def known_number(value: Any, what: str) -> float:
    """A number that must be known when a step is traced; RuleError where it is traced itself."""
    if is_traced(value):
        raise RuleError(
            f"{what} must be a Python number, and is traced here: close over it, or leave it out of inject_hyperparams"
        )
    return float(value)


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
