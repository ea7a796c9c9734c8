"""The leaves of a tree of arrays: their names, and what is wrong with those that no rule can update."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from rulec.compiler.layout import ITEM_SIZE
from rulec.errors import TensorError
from rulec.jax.pairs import COMPLEX, paired, unpaired

#: The name of a leaf that is the whole tree.
WHOLE = "the parameter"


@dataclass(frozen=True)
class Tree:
    """The leaves of a tree of arrays in their order, and its structure.

    Complex arrays are pairs of reals here, an axis more; `paired` are their places.
    """

    names: tuple[str, ...]
    arrays: tuple[Any, ...]
    structure: Any
    paired: frozenset[int] = frozenset()

    def of(self, arrays: Sequence[Any]) -> Any:
        """Other arrays, or None, in the same structure; complex where this tree's are."""
        return self.structure.unflatten(
            unpaired(array) if place in self.paired and array is not None else array
            for place, array in enumerate(arrays)
        )

    def check_real(self, why: str) -> None:
        """TensorError where a leaf is complex."""
        if self.paired:
            raise TensorError(
                f"the parameter {self.names[min(self.paired)]} is complex, and {why}: give its real and its imaginary "
                f"part as leaves of their own"
            )


def flat(tree: Any, what: str, wide: bool = True) -> Tree:
    """A tree's arrays by their paths, as in `layer/0/kernel`; TensorError for a leaf that no rule can update.

    No two paths are alike in words, or masks, patterns and tags would mean both: TensorError where they are.
    Where JAX is not `wide`, kept to 32 bits by its user, leaves of float64 are refused, and Python's numbers float32.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    variables = _variables(tree)
    names = tuple(leaf_name(path[:-1] if path[:-1] in variables else path) for path, _ in paths)
    check_apart(names)
    arrays = [_checked(array, called(what, name), wide) for name, (_, array) in zip(names, paths, strict=True)]
    complex_places = frozenset(place for place, array in enumerate(arrays) if jnp.iscomplexobj(array))
    return Tree(names, tuple(map(paired, arrays)), structure, complex_places)


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
    if str(array.dtype) not in (*ITEM_SIZE, *COMPLEX.values()):
        raise TensorError(
            f"{name} is of {array.dtype}, and only {', '.join((*ITEM_SIZE, *COMPLEX.values()))} can be updated: leave "
            f"it out, as with optax.masked, or cast it"
        )
    if str(array.dtype) in ("float64", "complex128") and not wide:
        raise TensorError(
            f"{name} is of {array.dtype}, and JAX is kept to 32 bits: allow it 64 with "
            f"jax.config.update('jax_enable_x64', True) before arrays are made, or cast to "
            f"{'float32' if str(array.dtype) == 'float64' else 'complex64'}"
        )
    # Beside a number of Python, which is one of 64 bits here, an array of weak type would become one as well.
    weak = isinstance(array, jax.Array) and array.weak_type
    return jax.lax.convert_element_type(array, array.dtype) if weak else array


def like(tree: Any, model: Tree, what: str, wide: bool = True) -> Tree:
    """A tree's arrays where it has the structure of `model` and its shapes; TensorError otherwise."""
    found = flat(tree, what, wide)
    if found.structure != model.structure:
        raise _other_structure(found, model, what)
    arrays = []
    for place, (name, array, own) in enumerate(zip(found.names, found.arrays, model.arrays, strict=True)):
        if place in found.paired - model.paired:
            raise TensorError(f"{what} {name} is complex, and its parameter real: give its real part")
        made = jnp.stack([array, jnp.zeros_like(array)], -1) if place in model.paired - found.paired else array
        if made.shape != own.shape:
            kept = -1 if place in model.paired else None
            raise TensorError(f"{what} {name} has shape {made.shape[:kept]}, its parameter {tuple(own.shape)[:kept]}")
        arrays.append(made)
    return replace(found, arrays=tuple(arrays), paired=model.paired)


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
