"""The leaves of a tree of arrays: their names, and what is wrong with those that no rule can update."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rulec.backend.layout import ITEM_SIZE
from rulec.errors import TensorError

#: The name of a leaf that is the whole tree.
WHOLE = "the parameter"


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


def flat(tree: Any, what: str, wide: bool = True) -> Tree:
    """A tree's arrays by their paths, as in `layer/0/kernel`; TensorError for a leaf that no rule can update.

    No two paths are alike in words, or masks, patterns and tags would mean both: TensorError where they are.
    Where JAX is not `wide`, kept to 32 bits by its user, leaves of float64 are refused, and Python's numbers float32.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    variables = _variables(tree)
    names = tuple(leaf_name(path[:-1] if path[:-1] in variables else path) for path, _ in paths)
    check_apart(names)
    arrays = tuple(_checked(array, called(what, name), wide) for name, (_, array) in zip(names, paths, strict=True))
    return Tree(names, arrays, structure)


def _variables(tree: Any) -> set[Any]:
    """The paths of variables of Flax, which holds arrays in them at first and without them later."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return set()
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return {path for path, leaf in found if isinstance(leaf, nnx.Variable) and hasattr(leaf.get_raw_value(), "dtype")}


def leaf_name(path: Sequence[Any]) -> str:
    """The path of a leaf in words."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/") or WHOLE


def check_apart(names: Sequence[str]) -> None:
    """TensorError where two leaves have one name, as with the keys `a/b` and, in `a`, `b`."""
    if len(set(names)) < len(names):
        name = next(name for place, name in enumerate(names) if name in names[:place])
        raise TensorError(f"two leaves are called {name} by the keys on their paths: give each a name of its own")


def called(what: str, name: str) -> str:
    """A leaf in a sentence."""
    return what if name == WHOLE and what == WHOLE else f"{what} {name}"


def _checked(array: Any, name: str, wide: bool) -> Any:
    if isinstance(array, float) or (str(array.dtype) == "float64" and getattr(array, "weak_type", False)):
        return jnp.asarray(array).astype(jnp.float64 if wide else jnp.float32)
    if str(array.dtype) not in ITEM_SIZE:
        raise TensorError(
            f"{name} is of {array.dtype}, and only {', '.join(ITEM_SIZE)} can be updated: leave it out, as with "
            f"optax.masked, or cast it"
        )
    if str(array.dtype) == "float64" and not wide:
        raise TensorError(
            f"{name} is of float64, and JAX is kept to 32 bits: allow it 64 with "
            f"jax.config.update('jax_enable_x64', True) before arrays are made, or cast to float32"
        )
    # Beside a number of Python, which is one of 64 bits here, an array of weak type would become one as well.
    weak = isinstance(array, jax.Array) and array.weak_type
    return jax.lax.convert_element_type(array, array.dtype) if weak else array


def like(tree: Any, model: Tree, what: str, wide: bool = True) -> Tree:
    """A tree's arrays where it has the structure of `model` and its shapes; TensorError otherwise."""
    found = flat(tree, what, wide)
    if found.structure != model.structure:
        raise _other_structure(found, model, what)
    for name, array, own in zip(found.names, found.arrays, model.arrays, strict=True):
        if array.shape != own.shape:
            raise TensorError(f"{what} {name} has shape {tuple(array.shape)}, its parameter {tuple(own.shape)}")
    return found


def _other_structure(found: Tree, model: Tree, what: str) -> TensorError:
    missing = [name for name in model.names if name not in set(found.names)]
    extra = [name for name in found.names if name not in set(model.names)]
    if missing:
        return TensorError(
            f"{what} {missing[0]} is missing (None, or no leaf): every parameter needs one; leave those that are not "
            f"trained out of the tree, as with optax.masked"
        )
    if extra:
        return TensorError(f"{what} {extra[0]} is given, and there is no such parameter: leave it out, or set it None")
    return TensorError(
        f"the containers of the parameters are {model.structure}, and those of {what} them {found.structure}: give "
        f"both in the same"
    )
