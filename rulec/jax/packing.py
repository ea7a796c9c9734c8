"""States of many leaves in few arrays: the cost of a call of JAX grows with the number of its arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rulec.errors import TensorError
from rulec.functional.quantized import Coded, Unbiased
from rulec.jax.library import is_traced

#: The field of a state with the statistics of the last step, which is never packed.
STATISTICS = "statistics"

#: Where a leaf's array lies: in which of the flat arrays, from which element on, and its shape.
Where = tuple[int, int, tuple[int, ...]]


class Packing:
    """How the leaves of a tree lie in flat arrays: each leaf's place, None where it has no array; and the tree."""

    def __init__(self, places: tuple[Where | None, ...], structure: Any) -> None:
        self.places, self.structure = places, structure
        # JAX asks for it at every call, and there may be thousands of places.
        self._hash = hash((places, structure))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        key = self.places, self.structure
        return isinstance(other, Packing) and self._hash == other._hash and key == (other.places, other.structure)


@jax.tree_util.register_pytree_node_class
class Packed:
    """One state of all leaves, end to end in a flat array for each dtype: a pytree of the flat arrays.

    `tree` is the state as a tree like the parameters, of copies.
    """

    def __init__(self, flats: Sequence[Any], packing: Packing) -> None:
        self.flats, self.packing = tuple(flats), packing

    def tree_flatten(self) -> tuple[tuple[Any, ...], Packing]:
        """The flat arrays, and how leaves lie in them."""
        return self.flats, self.packing

    @classmethod
    def tree_unflatten(cls, packing: Packing, flats: Sequence[Any]) -> Packed:
        """The same packing of other flat arrays."""
        return cls(flats, packing)

    def __repr__(self) -> str:
        return f"Packed({len(self.packing.places)} leaves in {', '.join(map(str, map(_described, self.flats)))})"

    @property
    def tree(self) -> Any:
        """A tree like the parameters, with None for a leaf without this state."""
        if not all(map(on_host, self.flats)):
            return jax.tree.map(unpiece, self.pieces(), is_leaf=lambda x: x is None)
        with jax.ensure_compile_time_eval(), jax.enable_x64(True):
            parts = [_cut(flat, self._in(number)) for number, flat in enumerate(self.flats)]
        rest = [*map(iter, parts)]
        return self.packing.structure.unflatten([where and next(rest[where[0]]) for where in self.packing.places])

    def _in(self, number: int) -> list[Where]:
        """Where leaves lie in a flat array, in their order."""
        return [where for where in self.packing.places if where is not None and where[0] == number]

    def pieces(self) -> Any:
        """The same tree, with a `Piece` in the place of each leaf's array."""
        flats = [Flat(array) for array in self.flats]
        places = enumerate(self.packing.places)
        return self.packing.structure.unflatten(
            [where and Piece(i, flats[where[0]], *where[1:]) for i, where in places]
        )


def on_host(array: Any) -> bool:
    """Whether an array lies as a whole in the memory of NumPy, where many small arrays are joined faster."""
    if not isinstance(array, jax.Array) or is_traced(array):
        return False
    devices: Any = array.sharding.device_set
    return len(devices) == 1 and all(device.platform == "cpu" for device in devices)


def _put(arrays: Any, like: Any) -> Any:
    """Arrays of NumPy where another array of JAX lies; they may go on in the memory of NumPy."""
    return jax.device_put(arrays, like.sharding if like.committed else None)


def _cut(flat: Any, places: Sequence[Where]) -> Any:
    """The leaves of a flat array on the host, without a program of XLA with as many results."""
    if flat.is_deleted():
        raise TensorError(
            "the state was donated to an earlier call, which used its memory again: go on with what that call "
            "returned, or call step with donate=False"
        )
    numbers = np.array(flat)  # leaves may lie in this copy, and never in what a step writes over
    return _put([numbers[start : start + math.prod(shape)].reshape(shape) for _, start, shape in places], flat)


def _concatenated(arrays: Sequence[Any]) -> Any:
    """Arrays of one dtype end to end."""
    if not all(map(on_host, arrays)) or len({x.sharding for x in arrays}) > 1:
        return jnp.concatenate([x.reshape(-1) for x in arrays])
    # A step can write over an array of JAX's own alone, which the copy is.
    return _put(np.concatenate([np.asarray(x).reshape(-1) for x in arrays]), arrays[0]).copy()


def _described(flat: Any) -> str:
    return f"{flat.dtype}[{flat.size}]" if hasattr(flat, "dtype") else str(flat)


@dataclass(eq=False)
class Flat:
    """A flat array, which a step replaces as a whole."""

    array: Any


@dataclass(frozen=True, eq=False)
class Piece:
    """A leaf's part of a flat array, also after a step replaced it. `index` is its number in `Packing.places`."""

    index: int
    flat: Flat
    start: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        """Its dtype."""
        return self.flat.array.dtype

    @property
    def size(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    def array(self) -> Any:
        """The leaf's own array."""
        return self.flat.array[self.start : self.start + self.size].reshape(self.shape)


class Pieces(dict[int, Any]):
    """The arrays of a state by the places of their leaves; they were pieces of a `Packed` and become one again.

    `pieces` has a `Piece` for each leaf, or several in codes and scales.
    """

    def __init__(self, pieces: Mapping[int, Any], source: Packed) -> None:
        super().__init__(pieces)
        self.source = source
        #: Index of a piece -> the place of its leaf, and its number in the leaf's state: codes and scales are two.
        self.order = {
            part.index: (place, number)
            for place, piece in pieces.items()
            for number, part in enumerate(jax.tree.leaves(piece))
        }

    def packed(self) -> Packed:
        """All arrays, packed as they were."""
        by_flat: list[list[Any]] = [[] for _ in self.source.flats]
        for index, where in enumerate(self.source.packing.places):
            if where is not None:
                place, number = self.order[index]
                by_flat[where[0]].append(jax.tree.leaves(self[place])[number])
        return Packed([_joined(arrays) for arrays in by_flat], self.source.packing)


def _joined(arrays: Sequence[Any]) -> Any:
    """Arrays end to end: the flat one itself where all are still pieces of it."""
    if all(isinstance(x, Piece) for x in arrays):
        return arrays[0].flat.array
    return jnp.concatenate([unpiece(x).reshape(-1) for x in arrays])


def unpiece(array: Any) -> Any:
    """An array of its own, of an array or of a piece of a flat one; and codes and scales of their own."""
    if isinstance(array, Coded | Unbiased):
        return jax.tree.map(unpiece, array)
    return array.array() if isinstance(array, Piece) else array


def unpiece_all(states: Iterable[dict[int, Any]], places: Sequence[int]) -> None:
    """Gives these leaves arrays of their own."""
    for arrays in states:
        if isinstance(arrays, Pieces):
            arrays.update({place: unpiece(arrays[place]) for place in places if place in arrays})


def packed(state: Any) -> Any:
    """A state whose trees are packed: `rulec.jax.step` takes it, and gives one back.

    Its fields that were trees are `Packed`. A step on many small leaves on one device costs about half with it. Leaves
    are no longer sharded each in its own way. TensorError for a complex state.
    """
    return _mapped(state, lambda field: field if hasattr(field, "dtype") else _pack(field))


def unpacked(state: Any) -> Any:
    """A state with trees like the parameters again, as `rulec.jax.init` gives it; one that is not packed as it is."""
    return _mapped(state, lambda field: field.tree if isinstance(field, Packed) else field)


def _mapped(state: Any, function: Callable[[Any], Any]) -> Any:
    fields = [name for name in state._fields if name != STATISTICS]
    return state._replace(**{name: function(getattr(state, name)) for name in fields})


def _pack(tree: Any) -> Any:
    if tree is None or isinstance(tree, Packed):
        return tree
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    places, parts = _places(leaves)
    flats = [*map(_concatenated, parts)]
    return Packed(flats, Packing(tuple(places), structure))


def _places(leaves: Iterable[Any]) -> tuple[list[Where | None], list[list[Any]]]:
    """The place of each leaf, leaves of one dtype together; and the leaves of each flat array."""
    number: dict[str, int] = {}
    parts: list[list[Any]] = []
    ends: list[int] = []
    places: list[Where | None] = []
    for leaf in leaves:
        if leaf is None:
            places.append(None)
            continue
        if jnp.iscomplexobj(leaf):
            raise TensorError(
                f"a state of {leaf.dtype} cannot be packed: leave packed out where a parameter is complex"
            )
        flat = number.setdefault(str(leaf.dtype), len(parts))
        if flat == len(parts):
            parts.append([])
            ends.append(0)
        places.append((flat, ends[flat], tuple(leaf.shape)))
        parts[flat].append(leaf)
        ends[flat] += leaf.size
    return places, parts
