"""The leaves of a tree of arrays: their names, and what is wrong with those that no rule can update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rulec.backend.layout import ITEM_SIZE
from rulec.errors import StateMismatch, TensorError


@dataclass(frozen=True)
class Leaf:
    """A parameter as a plan knows it: its path, its shape, and its dtype and its gradient's by our names.

    `states` are the dtypes of the states that it has already, by name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    grad_dtype: str
    states: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Tree:
    """The leaves of a tree of arrays in their order, and its structure."""

    names: tuple[str, ...]
    arrays: tuple[Any, ...]
    structure: Any


def flat(tree: Any, what: str) -> Tree:
    """A tree's arrays by their paths, as in `layer/0/kernel`; TensorError for a leaf that no rule can update."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = tuple(_name(path) for path, _ in paths)
    arrays = tuple(_checked(array, name, what) for name, (_, array) in zip(names, paths, strict=True))
    return Tree(names, arrays, structure)


def _name(path: Sequence[Any]) -> str:
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/") or "the parameter"


def _checked(array: Any, name: str, what: str) -> Any:
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        if isinstance(array, int | float):
            return jnp.asarray(array, jnp.result_type(float))
        raise TensorError(f"{what} {name} is a {type(array).__name__}, which is no array: leave it out of the tree")
    if str(array.dtype) not in ITEM_SIZE:
        raise TensorError(
            f"{what} {name} is of {array.dtype}, and only {', '.join(ITEM_SIZE)} can be updated: leave it out, as with "
            f"optax.masked, or cast it"
        )
    return array


def like(tree: Any, model: Tree, what: str) -> Tree:
    """A tree's arrays where it has the structure of `model` and its shapes; TensorError or StateMismatch otherwise."""
    found = flat(tree, what)
    if found.structure != model.structure:
        raise _other_structure(found, model, what)
    for name, array, own in zip(found.names, found.arrays, model.arrays, strict=True):
        if array.shape != own.shape:
            raise TensorError(f"{what} {name} has shape {tuple(array.shape)}, its parameter {tuple(own.shape)}")
    return found


def _other_structure(found: Tree, model: Tree, what: str) -> Exception:
    missing = [name for name in model.names if name not in set(found.names)]
    extra = [name for name in found.names if name not in set(model.names)]
    if missing and what == "the gradient of":
        return TensorError(
            f"there is no gradient of {missing[0]} (None, or no leaf): every parameter needs one; leave those that are "
            f"not trained out of the tree, as with optax.masked"
        )
    if missing or extra:
        word = f"has no {missing[0]}" if missing else f"has {extra[0]} besides"
        return StateMismatch(f"the tree that is given as {what} {word}: it must have the structure of the parameters")
    return StateMismatch(
        f"the tree that is given as {what} is {found.structure}, and the parameters' is {model.structure}: give both "
        f"in the same containers"
    )
