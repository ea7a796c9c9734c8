"""First states that are sharded as their parameters are, under jit too, where nobody knows yet how these are."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from rulec.compiler.ir import Axes
from rulec.compiler.view import MatrixView


def never() -> Any:
    """False, which XLA cannot know."""
    return jax.lax.optimization_barrier(jnp.zeros((), bool))  # type: ignore[no-untyped-call]


def filled(
    shape: tuple[int, ...], number: Any, dtype: str, axes: Axes, param: Any, view: MatrixView, taken: Any
) -> Any:
    """A state of one number everywhere, in this shape: `axes` say which of its parameter's it has.

    `taken` is what `never` gives; all states of a tree may share it.
    """
    model = _reduced(param, axes, view)
    if model is None or model.size != math.prod(shape):
        return jnp.full(shape, number, dtype)
    model = model.reshape(shape).astype(dtype)
    # XLA shards what meets element by element alike. Only then may it see that one of the two is never taken.
    return jax.lax.select(taken, model, jnp.full_like(model, number))


def _reduced(param: Any, axes: Axes, view: MatrixView) -> Any:
    """Something of a parameter that is sharded as a state should be: without the axes that the state lacks."""
    if axes.elementwise:
        return param
    rows, cols = view.axes
    if (axes.rows is None) == (axes.cols is None):
        return None
    return jnp.max(param, axis=cols if axes.cols is None else rows, keepdims=True, initial=0)
