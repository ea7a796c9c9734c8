"""Trees of MLX's arrays: the leaves that are trained, and trees side by side."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_map

from rulec.compiler.layout import FLOATS
from rulec.errors import TensorError
from rulec.functional.values import dtype_name


def parameter_tree(params: Any) -> Any:
    """The tree itself, or of a module its trainable parameters."""
    return params.trainable_parameters() if isinstance(params, Module) else params  # type: ignore[no-untyped-call]


def is_trained(parameter: Any) -> bool:
    """Whether a leaf is trained: not None, and no array of whole numbers or of truth values."""
    if isinstance(parameter, mx.array):
        return not (mx.issubdtype(parameter.dtype, mx.integer) or parameter.dtype == mx.bool_)
    return parameter is not None


def is_moved(gradient: Any, parameter: Any) -> bool:
    """Whether a step moves a parameter: it is trained and has a gradient."""
    return gradient is not None and (parameter is None or is_trained(parameter))


def without_none(tree: Any) -> Any:
    """The tree without leaves that are None; in a list an empty dict stands for each."""
    if isinstance(tree, dict):
        return {key: without_none(each) for key, each in tree.items() if each is not None}
    if isinstance(tree, list | tuple):
        return type(tree)({} if each is None else without_none(each) for each in tree)
    return tree


def trained_leaves(parameters: Any) -> dict[str, Any]:
    """Path -> array of the leaves that are trained. TensorError for another dtype than ours."""
    every: dict[str, Any] = dict(tree_flatten(parameters))
    leaves = {name: array for name, array in every.items() if is_trained(array)}
    for name, array in leaves.items():
        check(name, array, array)
    return leaves


def check(name: str, gradient: Any, parameter: Any) -> None:
    """TensorError where a gradient or its parameter is no array of floats, or the shapes differ."""
    for what, array in (("parameter", parameter), ("gradient", gradient)):
        if not isinstance(array, mx.array) or dtype_name(array) not in FLOATS:
            kind = dtype_name(array) if isinstance(array, mx.array) else type(array).__name__
            raise TensorError(f"the {what} {name} is of {kind}, and only {', '.join(FLOATS)} can be updated: cast it")
    if gradient.shape != parameter.shape:
        raise TensorError(f"the gradient of {name} has shape {gradient.shape}, its parameter {parameter.shape}")


def together(gradients: Any, tree: Any, what: str) -> list[tuple[Any, Any]]:
    """Each gradient with the entry of a tree in its place; TensorError for a place without one."""
    pairs: list[tuple[Any, Any]] = []
    try:
        tree_map(lambda gradient, other: pairs.append((gradient, other)), gradients, tree)
    except (KeyError, IndexError) as error:
        raise TensorError(
            f"the gradients have {error.args[0]!r}, and the {what} nothing there: give gradients of the parameters "
            "that the optimizer was made ready for, by init"
        ) from None
    return pairs
