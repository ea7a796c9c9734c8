"""Tied parameters: one at several places of a tree. Its gradients are summed before its one update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from rulec.errors import TensorError
from rulec.jax.leaves import check_apart, leaf_name
from rulec.language.source import did_you_mean


@dataclass(frozen=True)
class Tied:
    """The places of tied parameters: pairs of a leaf's number and that of the leaf it is tied to, its origin."""

    origins: tuple[tuple[int, int], ...] = ()

    def once(self, tree: Any) -> Any:
        """The tree with None where a parameter stands again."""
        return self._changed(tree, lambda leaves, place, origin: None)

    def everywhere(self, tree: Any) -> Any:
        """The tree with every parameter wherever it stands; the inverse of `once`."""
        return self._changed(tree, lambda leaves, place, origin: leaves[origin])

    def apart(self, params: Any) -> tuple[Tied, Tied]:
        """The pairs within a layer, and the pairs within the rest; TensorError where a pair spans both."""
        count = len(jax.tree.leaves(params["layers"], is_leaf=_is_none))
        for place, origin in self.origins:
            if (place < count) != (origin < count):
                raise TensorError("a parameter of the rest cannot be one of the layers, of which there are many")
        of_layers = tuple(pair for pair in self.origins if pair[0] < count)
        return Tied(of_layers), Tied(tuple((a - count, b - count) for a, b in self.origins if a >= count))

    def _changed(self, tree: Any, function: Any) -> Any:
        if not self.origins:
            return tree
        leaves, structure = jax.tree.flatten(tree, is_leaf=_is_none)
        for place, origin in self.origins:
            leaves[place] = function(leaves, place, origin)
        return jax.tree.unflatten(structure, leaves)


#: Every parameter stands at one place alone.
ALONE = Tied()


def _is_none(x: Any) -> bool:
    return x is None


def tied_in(tree: Any, declared: Mapping[str, str]) -> Tied:
    """The tied parameters of a tree: leaves that are the same object, and declared ones.

    `declared` is leaf path -> path of the leaf it is tied to. TensorError for a path without a leaf, and for two leaves
    of different shapes or dtypes.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_none)
    leaves = [leaf for _, leaf in paths]
    origins = _same(leaves)
    if declared:
        names = [leaf_name(path) for path, _ in paths]
        check_apart(names)
        origins |= dict(_declared({name: place for place, name in enumerate(names)}, leaves, declared))
    roots = {place: _root(origins, place) for place in origins}
    return Tied(tuple((place, root) for place, root in sorted(roots.items()) if place != root))


def _same(leaves: list[Any]) -> dict[int, int]:
    seen: dict[int, int] = {}
    origins = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array) and seen.setdefault(id(leaf), place) != place:
            origins[place] = seen[id(leaf)]
    return origins


def _declared(names: Mapping[str, int], leaves: list[Any], declared: Mapping[str, str]) -> Any:
    for name, origin in declared.items():
        for path in (name, origin):
            if path not in names:
                raise TensorError(f"shared names {path!r}, and there is no such parameter{did_you_mean(path, names)}")
        one, other = leaves[names[name]], leaves[names[origin]]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise TensorError(
                f"{name} cannot be {origin}, as shared says: it is {one.dtype}{[*one.shape]}, and that "
                f"{other.dtype}{[*other.shape]}"
            )
        yield names[name], names[origin]


def _root(origins: Mapping[int, int], place: int) -> int:
    seen = {place}
    while place in origins:
        place = origins[place]
        if place in seen:
            return min(seen)
        seen.add(place)
    return place
