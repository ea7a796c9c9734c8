"""Inputs that are a matrix for each leaf, with a shape of its own: their places in the tree, and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from rulec.errors import TensorError
from rulec.functional.plan import StepPlan
from rulec.jax.leaves import Tree, called, paths_of


def matrices_by_leaf(tree: Any, model: Tree, what: str) -> list[Any]:
    """The matrix of each leaf of `model`, None where the tree has none; TensorError for one of no leaf."""
    paths, leaves, _ = paths_of(tree)
    matrices = {name: leaf for (_, name), leaf in zip(paths, leaves, strict=True)}
    for name in matrices:
        if name not in model.names:
            raise TensorError(f"{called(what, name)} is given, and there is no such parameter: leave it out")
    return [matrices.get(name) for name in model.names]


def check_inputs(plan: StepPlan, inputs: Mapping[str, Any]) -> None:
    """TensorError where a matrix that a step reads is missing, or of another shape or dtype."""
    for bucket in plan.buckets:
        for buffer in bucket.program.buffers:
            if buffer.role != "input" or buffer.axes.number or buffer.axes.elementwise or buffer.name not in inputs:
                continue
            for i, place in enumerate(bucket.places):
                what = f"the input {buffer.name} of {plan.leaves[place].name}"
                wanted = bucket.kept_shape(i, buffer.axes), bucket.layout.dtype(buffer.name)
                _check(inputs[buffer.name][place], what, *wanted)


def _check(matrix: Any, what: str, shape: Sequence[int], dtype: str) -> None:
    if matrix is None:
        raise TensorError(f"{what} is missing: the rule of this parameter needs a matrix of shape {tuple(shape)}")
    if jnp.shape(matrix) != tuple(shape):
        raise TensorError(f"{what} has shape {jnp.shape(matrix)}, where {tuple(shape)} is expected")
    if str(jnp.result_type(matrix)) != dtype:
        raise TensorError(f"{what} is of {jnp.result_type(matrix)}, where {dtype} is expected")
