"""Parameters with roles of axes in checkpoints: there they lie as torch keeps them.

States in codes of rules that do not depend on the layout of a parameter follow the parameter's own layout. Their blocks
have other elements in the layout of a file, so a file has such states decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rulec.checkpoint import Stored
from rulec.formats import decode, encode
from rulec.functional.axes import AxisRoles, Orientation
from rulec.functional.quantized import Coded
from rulec.jax.leaves import Tree
from rulec.jax.oriented import OrientedTree
from rulec.jax.state import Fields


def roles_in(tree: Tree, axes: AxisRoles) -> list[tuple[str, ...] | None]:
    """The roles of the axes of each tensor; empty for the layout of a file, None for an unknown layout."""
    orientations = tree.orientations if isinstance(tree, OrientedTree) else [None] * len(tree.names)
    said: list[tuple[str, ...] | None] = []
    for path, array, one in zip(tree.whole.names, tree.whole.arrays, orientations, strict=True):
        is_kernel = jnp.ndim(array) > 1 and path.rpartition("/")[2] == "kernel"
        known = one.roles if one is not None else None if is_kernel and not axes.knows(path) else ()
        said += [known] * (1 if one is None else one.count)
    return said


def placed(tree: Tree, arrays: Sequence[Any]) -> Any:
    """Arrays of all tensors in the structure of the leaves, on the devices of these."""
    with jax.enable_x64(True):
        return stored_as(tree.structure.unflatten(tree.whole.arrays), tree.holding(arrays))


class JaxArrays:
    """JAX's arrays as those of a file."""

    def stored(self, array: Any, format: str = "") -> Stored:
        """The bytes of an array; an array of codes has the key of its format."""
        return Stored.of(np.asarray(array), format=format)

    def array(self, stored: Stored, like: Any, placed_as: Any) -> Any:
        """A saved array in the shape and dtype of `like`, on the devices of `placed_as`."""
        values = np.array(stored.values.astype(like.dtype)).reshape(like.shape)
        with jax.enable_x64(True):
            return _on_devices(values, placed_as)


ARRAYS = JaxArrays()


def _on_devices(values: Any, placed_as: Any) -> Any:
    if getattr(placed_as, "committed", False):
        return jax.device_put(values, placed_as.sharding)
    return jnp.array(values)


def decoded_codes(coded: Coded, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The float32 values of a state in codes."""
    codes = np.asarray(coded.codes).reshape(coded.format.codes_shape(shape))
    return decode(coded.format, codes, np.asarray(coded.scales).reshape(-1), shape)


def without_turned_codes(
    state: Any, fields: Fields, tree: Tree, in_a_run: Callable[[str, tuple[int, ...]], Orientation | None]
) -> Any:  # fmt: skip
    """The state with values in the place of codes of leaves that lie otherwise in a file than in a run.

    `in_a_run` gives the orientation of a leaf in a run by its path and shape.
    """
    assert isinstance(tree, OrientedTree)
    changed = {}
    for name in fields.arrays.values():
        leaves = tree.structure.flatten_up_to(getattr(state, name))
        for place, (coded, array) in enumerate(zip(leaves, tree.whole.arrays, strict=True)):
            shape = tuple(array.shape)
            turned = tree.orientations[place] is not None and in_a_run(tree.whole.names[place], shape) is None
            if turned and isinstance(coded, Coded):
                leaves[place] = jnp.asarray(decoded_codes(coded, shape))
        changed[name] = tree.structure.unflatten(leaves)
    return state._replace(**changed)


def stored_as(like: Any, tree: Any) -> Any:
    """A tree in the codes and on the devices of another with its structure."""
    return jax.tree.map(_stored_as, like, tree, is_leaf=lambda x: isinstance(x, Coded))


def _stored_as(like: Any, value: Any) -> Any:
    if isinstance(like, Coded) and not isinstance(value, Coded):
        codes, scales = encode(like.format, np.asarray(value))
        value = Coded(codes.reshape(like.codes.shape), scales.reshape(like.scales.shape), like.format)
    return jax.tree.map(lambda new, old: _on_devices(new, old), value, like)
