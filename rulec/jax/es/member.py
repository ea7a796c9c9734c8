"""Members as whole trees of parameters, and their fitness, on one device or dealt to several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rulec.errors import HyperError, TensorError
from rulec.es.perturbation import Perturbation
from rulec.jax.es.state import Layer, State, leaves, noise_of, wide


def member(params: Any, state: State, perturbation: Perturbation, index: Any) -> Any:
    """The parameters of one member by its number, which may be traced; members of positive sign come first.

    HyperError for a Python number without a member.
    """
    if isinstance(index, int) and not 0 <= index < perturbation.members:
        raise HyperError(f"there is no member {index}: give a number from 0 to {perturbation.members - 1}")
    moved = [
        leaf if layer is None else _moved(leaf, layer, state, perturbation, index)
        for leaf, layer in leaves(params, state, perturbation)
    ]
    return jax.tree.unflatten(jax.tree.structure(params), moved)


def _moved(leaf: Any, layer: Layer, state: State, perturbation: Perturbation, index: Any) -> Any:
    sign = jnp.where(jnp.asarray(index) < perturbation.directions, 1.0, -1.0)
    family = noise_of(perturbation, state, layer)
    noise = family.dense(jnp.asarray(index) % perturbation.directions)
    start = leaf.astype(wide(leaf.dtype))
    return (start + sign.astype(start.dtype) * family.change(noise, start)).astype(leaf.dtype)


def evaluate(
    loss: Callable[..., Any], params: Any, state: State, perturbation: Perturbation, *batch: Any,
    mesh: Any = None, axis_name: str | None = None, chunk: int | None = None,
) -> Any:  # fmt: skip
    """The fitness of all members, minus `loss(params, *batch)`: (members,) of float32 or float64.

    All members of a device are evaluated together, or `chunk` at a time. With a `mesh` they are dealt to the devices
    along its axis, by default its first, as many to each, and all have the result. With a `chunk` the numbers are the
    same on however many devices. Memory is that of the members of a chunk, with their weights; see `batched` for one
    without. HyperError where members cannot be dealt so.
    """
    axis = None if mesh is None else axis_name or mesh.axis_names[0]
    devices = 1 if mesh is None else mesh.shape[axis]
    _check_dealt(perturbation.members, devices, chunk)

    def fitness(params: Any, state: State, *batch: Any) -> Any:
        def one(index: Any) -> Any:
            return _number(loss(member(params, state, perturbation, index), *batch))

        indices = jnp.arange(perturbation.members // devices)
        indices = indices if axis is None else indices + indices.size * jax.lax.axis_index(axis)
        values = -(jax.lax.map(one, indices, batch_size=chunk) if chunk else jax.vmap(one)(indices))
        return values if axis is None else jax.lax.all_gather(values, axis, tiled=True)

    if mesh is not None:
        everywhere = jax.P()  # type: ignore[no-untyped-call]
        if jax.sharding.get_abstract_mesh().empty:
            # With axes that are Explicit the result could meet only arrays whose types name the mesh as well.
            mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
        fitness = jax.shard_map(fitness, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    return fitness(params, state, *batch)


def _check_dealt(members: int, devices: int, chunk: int | None) -> None:
    if members % devices:
        raise HyperError(f"{members} members cannot be dealt to {devices} devices: make them a multiple")
    if chunk is not None and (chunk < 1 or members // devices % chunk):
        raise HyperError(f"chunk={chunk} does not divide the {members // devices} members of a device")


def _number(loss: Any) -> Any:
    number = jnp.asarray(loss)
    if number.ndim:
        raise TensorError(f"the loss of a member has shape {number.shape}: it must be one number, such as a mean")
    return number.astype(wide(number.dtype))
