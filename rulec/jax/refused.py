"""The user's mistake behind an error of JAX: it names the leaf by its path, and the remedy.

The operands are examined only after a call has failed: thousands of leaves cost nothing where all is well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rulec.errors import RulecError, TensorError
from rulec.jax.leaves import called, leaf_name
from rulec.jax.library import is_traced

#: Parameter of a function -> the words for a leaf of its operand.
_WORDS: Mapping[str, str] = {
    "params": "the parameter", "grads": "the gradient of", "state": "the state's", "inputs": "the input",
}  # fmt: skip

_NUMBERS = bool | int | float | complex


def without_remarks(error: RulecError) -> None:
    """Removes JAX's notes about its frames from an error."""
    error.__dict__.pop("__notes__", None)


def explained(error: Exception, function: Callable[..., Any], operands: Sequence[Any]) -> TensorError | None:
    """The user's mistake behind an error of JAX, in one sentence; None where it is not known."""
    named = dict(zip(inspect.signature(function).parameters, operands, strict=True))
    leaves = [leaf for name, words in _WORDS.items() if name in named for leaf in _leaves(named[name], words)]
    if isinstance(error, TypeError):
        return _stranger(leaves)
    return _deleted(leaves) or (_twice(leaves) if "donate" in str(error) else None)


def _leaves(tree: Any, words: str) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield called(words, leaf_name(path)), leaf


def _stranger(leaves: Sequence[tuple[str, Any]]) -> TensorError | None:
    for name, leaf in leaves:
        known = isinstance(leaf, jax.Array | np.ndarray | np.generic | _NUMBERS) or hasattr(leaf, "__jax_array__")
        if not known or getattr(leaf, "dtype", None) == np.dtype(object):
            return TensorError(
                f"{name} is {_kind(leaf)}, which is no array of JAX: convert it with jnp.asarray, or leave it out of "
                f"the tree"
            )
    return None


def _kind(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray):
        return "a NumPy array of objects"
    module, name = type(leaf).__module__.partition(".")[0], type(leaf).__qualname__
    word = name if module == "builtins" else f"{module}.{name}"
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _deleted(leaves: Sequence[tuple[str, Any]]) -> TensorError | None:
    for name, leaf in leaves:
        if isinstance(leaf, jax.Array) and not is_traced(leaf) and leaf.is_deleted():
            return TensorError(
                f"{name} was donated to an earlier call, which used its memory again: go on with what that call "
                f"returned, or call step with donate=False"
            )
    return None


def _twice(leaves: Sequence[tuple[str, Any]]) -> TensorError | None:
    seen: dict[int, str] = {}
    for name, leaf in leaves:
        if isinstance(leaf, jax.Array) and seen.setdefault(id(leaf), name) != name:
            return TensorError(
                f"{name} is the same array as {seen[id(leaf)]}, and its memory can be used again only once: copy one "
                f"of them, or call step with donate=False"
            )
    return None
