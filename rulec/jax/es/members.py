"""The members of a population in JAX: one forward pass of all members in a batch, or members as trees of parameters.

In a batch, no member's weights are computed. As trees, the fitness of members is evaluated on one device, or members
are divided among several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from rulec.errors import HyperError, TensorError
from rulec.es.perturbation import Perturbation, repeats_of, tiled
from rulec.jax.es.state import Layer, State, leaves, noise_of, wide


def member_batch(x: Any, perturbation: Perturbation, shared: bool = True) -> Any:
    """A batch for `batched` parameters: every member sees all rows of `x`, or, not `shared`, each its part of them.

    Shared rows become members times as many. TensorError where rows that are not shared cannot be dealt evenly.
    """
    if shared:
        return jnp.asarray(x)[tiled(x.shape[0], perturbation)]
    repeats_of(x.shape[0], perturbation)
    return jnp.asarray(x)


def batched(params: Any, state: State, perturbation: Perturbation) -> Any:
    """The parameters with a `Perturbed` in the place of each leaf that is perturbed.

    A network of `x @ weight + bias`, `es.conv` and `es.take` then works on a batch of all members. Row number
    repeat*directions + direction belongs to a member of this direction; where antithetic, to the member of positive
    sign in the first half of the rows.
    """
    perturbed = [
        leaf if layer is None else Perturbed(leaf, state, layer, perturbation)
        for leaf, layer in leaves(params, state, perturbation)
    ]
    return jax.tree.unflatten(jax.tree.structure(params), perturbed)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Perturbed:
    """A leaf as each row of a batch sees it, by its member: for products with rows, sums and products by element."""

    weight: Any
    state: State
    layer: Layer = field(metadata={"static": True})
    perturbation: Perturbation = field(metadata={"static": True})

    __array_ufunc__ = None  # arrays of NumPy leave their products with it to it

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the leaf."""
        return self.layer.shape

    @property
    def ndim(self) -> int:
        """How many dimensions the leaf has."""
        return len(self.layer.shape)

    def __rmatmul__(self, x: Any) -> Any:
        return dot(x, self)

    def __radd__(self, x: Any) -> Any:
        return x + self.rows(x)

    def __rmul__(self, x: Any) -> Any:
        return x * self.rows(x)

    __add__, __mul__ = __radd__, __rmul__

    def rows(self, x: Any) -> Any:
        """A vector as each of the rows of `x` sees it, to meet its last dimension; TensorError for a matrix."""
        if self.ndim != 1:
            raise TensorError(f"{self.layer.name} is {list(self.shape)}: only vectors meet rows element by element")
        repeats = repeats_of(x.shape[0], self.perturbation)
        vectors = noise_of(self.perturbation, self.state, self.layer).vectors(self.weight, repeats)
        return vectors.reshape(-1, *(1,) * (x.ndim - 2), self.shape[0])

    def product(self, x: Any, apply: Callable[[Any, Any], Any]) -> Any:
        """Rows (rows, ..., inputs) by `apply(x, kernel)`, which is linear in the kernel (*window, inputs, outputs)."""
        if x.shape[-1] != self.shape[-2]:
            raise TensorError(f"{self.layer.name} {list(self.shape)} cannot be applied to rows of {x.shape[-1]} inputs")
        repeats = repeats_of(x.shape[0], self.perturbation)
        rows = x.reshape(repeats, self.perturbation.directions, *x.shape[1:])
        noise = noise_of(self.perturbation, self.state, self.layer, x.dtype)
        outputs = noise.product(rows, self.weight, apply)
        return outputs.reshape(-1, *outputs.shape[2:])


def dot(x: Any, weight: Any, **options: Any) -> Any:
    """`x @ weight`, of rows (rows, ..., inputs) and a matrix (inputs, outputs), perturbed or not.

    Options are those of `jnp.matmul`, such as `precision`.
    """
    if not isinstance(weight, Perturbed):
        return jnp.matmul(x, weight, **options)
    if weight.ndim != 2:
        raise TensorError(f"{weight.layer.name} is {list(weight.shape)}: a product takes a matrix (inputs, outputs)")
    return weight.product(x, lambda rows, kernel: jnp.matmul(rows, kernel, **options))


def conv(x: Any, kernel: Any, strides: Sequence[int] | int = 1, padding: Any = "SAME", **options: Any) -> Any:
    """A convolution of rows (rows, *space, channels) by a kernel (*window, inputs, outputs), perturbed or not.

    `padding` and further options are those of `jax.lax.conv_general_dilated`. TensorError for a perturbed kernel with
    groups of channels.
    """
    space = kernel.ndim - 2
    letters = "".join(chr(ord("0") + axis) for axis in range(space))
    strides = (strides,) * space if isinstance(strides, int) else tuple(strides)
    layout = f"N{letters}C", f"{letters}IO", f"N{letters}C"

    def apply(rows: Any, weight: Any) -> Any:
        return jax.lax.conv_general_dilated(rows, weight, strides, padding, dimension_numbers=layout, **options)

    if not isinstance(kernel, Perturbed):
        return apply(x, kernel)
    if options.get("feature_group_count", 1) != 1 or options.get("batch_group_count", 1) != 1:
        raise TensorError(f"{kernel.layer.name} has groups of channels, which are perturbed by es.member alone")
    return kernel.product(x, apply)


def take(table: Any, indices: Any) -> Any:
    """Lines of a table (entries, features) at indices (rows, ...), perturbed or not: (rows, ..., features)."""
    if not isinstance(table, Perturbed):
        return jnp.take(table, indices, axis=0)
    if table.ndim != 2:
        raise TensorError(f"{table.layer.name} is {list(table.shape)}: a table is (entries, features)")
    repeats = repeats_of(indices.shape[0], table.perturbation)
    noise = noise_of(table.perturbation, table.state, table.layer, table.weight.dtype)
    lines = noise.taken(indices.reshape(repeats, table.perturbation.directions, *indices.shape[1:]), table.weight)
    return lines.reshape(-1, *lines.shape[2:])


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
