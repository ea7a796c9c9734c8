"""Trees of arrays as rules see them, where the axes of some leaves have roles.

A leaf with roles is one tensor, or one for each index of its batch; `rulec.functional.axes` has their shapes. A state
of the shape of a tensor lies in the layout of its parameter. Any other state of a batch begins with the batch's axes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rulec.errors import HyperError, StateMismatch
from rulec.functional.axes import AxisRoles, Orientation, is_roles, roles_of
from rulec.functional.quantized import Coded, Unbiased
from rulec.jax.first import never
from rulec.jax.leaves import Tree, leaf_name, paired, unpaired
from rulec.jax.library import automatic
from rulec.jax.packing import Piece

#: The roles of axes as users give them: a tree like the parameters, or a mapping of paths and patterns.
Axes = Any


def axis_roles(axes: Axes) -> AxisRoles:
    """The roles in a tree like the parameters, or in a mapping of paths and patterns. HyperError as by `roles_of`."""
    if axes is None or isinstance(axes, AxisRoles):
        return axes or AxisRoles()
    if is_roles(axes):
        raise HyperError(f"axes={axes!r} are those of one array: give them by path, as in {{'*kernel': {axes!r}}}")
    paths, _ = jax.tree_util.tree_flatten_with_path(axes, is_leaf=lambda x: is_roles(x) or _is_variable(x))
    return roles_of([(leaf_name(path), x.get_raw_value() if _is_variable(x) else x) for path, x in paths])


def turned_and_seen(axes: Axes) -> tuple[dict[str, Sequence[int]], AxisRoles]:
    """The numbers of axes in `axes`, by path, and the roles in it."""
    if not isinstance(axes, Mapping):
        return {}, axis_roles(axes)
    turned = {key: value for key, value in axes.items() if _is_order(value)}
    return turned, axis_roles({key: value for key, value in axes.items() if key not in turned})


def _is_order(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(number, int) for number in value)


def _is_variable(value: Any) -> bool:
    """Whether a value is a variable of Flax."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Variable)


@dataclass(frozen=True)
class OrientedTree(Tree):
    """The tensors that rules see of the leaves of `plain`, each leaf with its orientation, or None.

    With `in_memory` XLA makes the tensors in memory, and so computes with the same bits whatever the layout.
    """

    plain: Tree | None = None
    orientations: tuple[Orientation | None, ...] = ()
    in_memory: bool = False

    @property
    def whole(self) -> Tree:
        """The tree of the leaves of the structure."""
        assert self.plain is not None
        return self.plain

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of the leaf of each tensor."""
        pairs = zip(self.whole.names, self.orientations, strict=True)
        return tuple(name for name, one in pairs for _ in range(_count(one)))

    def apart(self, values: Sequence[Any]) -> list[Any]:
        """A value for each tensor, from those for each leaf of the structure."""
        triples = zip(self.orientations, values, self.whole.names, strict=True)
        return [part for one, value, name in triples for part in _apart(one, value, name, self.in_memory)]

    def holding(self, values: Sequence[Any]) -> Any:
        """Values of any shape, one for each tensor, in the structure of the leaves."""
        return self.whole.holding([
            _joined(one, values[start : start + _count(one)], leaf)
            for (one, start), leaf in zip(self._starts(), self.whole.arrays, strict=True)
        ])  # fmt: skip

    def _starts(self) -> Iterator[tuple[Orientation | None, int]]:
        """Each orientation, with the place of the first tensor of its leaf."""
        start = 0
        for one in self.orientations:
            yield one, start
            start += _count(one)


def _count(one: Orientation | None) -> int:
    return 1 if one is None else one.count


def oriented(
    tree: Tree, orient: Callable[[str, tuple[int, ...]], Orientation | None], in_memory: bool = False
) -> Tree:  # fmt: skip
    """The tensors that rules see of a tree; the tree itself where all are seen as they are.

    `orient` gives the orientation of a leaf by its path and shape, and None for a leaf without one.
    """
    orientations: list[Orientation | None] = []
    for place, (name, array) in enumerate(zip(tree.names, tree.arrays, strict=True)):
        shape = tuple(array.shape)[: -1 if place in tree.paired else None]
        one = None if place in tree.untrained else orient(name, shape)
        orientations.append(None if one is None or one.is_plain or not one.count else one)
    return _seen(tree, orientations, in_memory)


def oriented_as(tree: Tree, model: Tree) -> Tree:
    """The tensors that rules see of a tree with the leaves of another, such as gradients."""
    return _seen(tree, model.orientations, model.in_memory) if isinstance(model, OrientedTree) else tree


def _seen(tree: Tree, orientations: Sequence[Orientation | None], in_memory: bool) -> Tree:
    if not any(orientations):
        return tree
    names: list[str] = []
    arrays: list[Any] = []
    places: dict[int, range] = {}
    for place, (name, array, one) in enumerate(zip(tree.names, tree.arrays, orientations, strict=True)):
        places[place] = range(len(names), len(names) + _count(one))
        names += [name] if one is None else one.names(name)
        if place in tree.paired and one is not None:
            arrays += map(paired, _apart(one, unpaired(array), name, in_memory))
        else:
            arrays += _apart(one, array, name, in_memory)
    pairs, untrained, absent = (
        frozenset(new for place in old for new in places[place]) for old in (tree.paired, tree.untrained, tree.absent)
    )
    return OrientedTree(
        tuple(names), tuple(arrays), tree.structure, pairs, untrained, absent, tree, tuple(orientations), in_memory
    )


# One leaf


def _apart(one: Orientation | None, value: Any, name: str, in_memory: bool) -> list[Any]:
    """The values of the tensors of a leaf."""
    if one is None:
        return [value]
    if value is None:
        return [None] * one.count
    if isinstance(value, Piece):
        raise StateMismatch(
            f"the state is packed, and the axes of {name} have roles: give the state that rulec.jax.unpacked returns"
        )
    if isinstance(value, Coded):
        parts = (_apart_stack(one, array, name) for array in (value.codes, value.scales))
        return [Coded(codes, scales, value.format) for codes, scales in zip(*parts, strict=True)]
    if isinstance(value, Unbiased):
        return [Unbiased(part) for part in _apart(one, value.values, name, in_memory)]
    shape = tuple(jnp.shape(value))
    if shape == one.shape:
        return _tensors(one, value, in_memory)
    return _apart_stack(one, value[0] if shape == (1, *one.shape) else value, name)


def _tensors(one: Orientation, array: Any, in_memory: bool) -> list[Any]:
    """The tensors of a leaf, from an array of its shape."""

    def parts(array: Any) -> list[Any]:
        each = one.apart(array, jnp)
        return jax.lax.optimization_barrier(each) if in_memory else each  # type: ignore[no-untyped-call]

    tensors: list[Any] = automatic(parts, (array,), [_seen_spec(one, array)] * one.count)
    return tensors


def _apart_stack(one: Orientation, stack: Any, name: str) -> list[Any]:
    """The arrays of the tensors of a leaf, from one that begins with the axes of the batch."""
    if tuple(jnp.shape(stack))[: len(one.batch)] != one.batch:
        raise StateMismatch(
            f"a state of {name} has shape {tuple(jnp.shape(stack))}, which does not begin with the batch "
            f"{one.batch} of its axes: give the axes and the parameters as they were at init"
        )
    spec = PartitionSpec(*_spec(stack)[len(one.batch) :])  # type: ignore[no-untyped-call]
    arrays: list[Any] = automatic(lambda x: one.of_each(x, jnp), (stack,), [spec] * one.count)
    return arrays


def _joined(one: Orientation | None, values: Sequence[Any], leaf: Any) -> Any:
    """The inverse of `_apart`; `leaf` is the array of the leaf."""
    first = values[0]
    if one is None or first is None:
        return first
    if isinstance(first, Coded):
        codes, scales = (_stack(one, arrays) for arrays in zip(*((x.codes, x.scales) for x in values), strict=True))
        return Coded(codes, scales, first.format)
    if isinstance(first, Unbiased):
        return Unbiased(_joined(one, [x.values for x in values], leaf))
    if tuple(first.shape) == one.seen:
        return _laid_out(one, values, leaf)
    stack = _stack(one, values)
    return stack[None] if tuple(stack.shape) == one.shape else stack


def _laid_out(one: Orientation, values: Sequence[Any], leaf: Any) -> Any:
    """An array of the shape of each tensor in the layout of the leaf, and sharded as it is."""

    def joined(values: Any, leaf: Any) -> Any:
        array = one.joined(values, jnp)
        if not one.batch or jnp.shape(leaf) != array.shape:
            return array
        # XLA gives both arms of an elementwise select one sharding. That of the leaf was lost to slices of the batch.
        return jax.lax.select(never(), leaf.astype(array.dtype), array)

    spec = PartitionSpec(*_spec(leaf)[: len(one.shape)])  # type: ignore[no-untyped-call]
    return automatic(joined, ([*values], leaf), spec)


def _stack(one: Orientation, values: Sequence[Any]) -> Any:
    spec = PartitionSpec(*[None] * len(one.batch), *_spec(values[0]))  # type: ignore[no-untyped-call]
    return automatic(lambda *values: one.of_all(values, jnp), tuple(values), spec)


def _spec(array: Any) -> Any:
    """The sharding of each axis of an array by a mesh of explicit axes; None for each elsewhere."""
    spec = getattr(jax.typeof(array).sharding, "spec", ())
    return (*spec, *[None] * (jnp.ndim(array) - len(spec)))


def _seen_spec(one: Orientation, array: Any) -> PartitionSpec:
    """The sharding of each tensor of a leaf: joined axes that are sharded within are on every device."""
    spec: Mapping[str, list[Any]] = {role: [] for role in one.roles}
    for name, role in zip(_spec(array), one.roles, strict=True):
        spec[role].append(name)
    sides = [spec[role] for role in ("outputs", "inputs") if role in spec]
    joined = [side[0] if not any(side[1:]) else None for side in sides]
    return PartitionSpec(*joined, *spec.get("window", []))  # type: ignore[no-untyped-call]
