"""First states with the shardings of their parameters, under jit too, where the shardings are not known yet."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rulec.compiler.ir import Axes
from rulec.compiler.view import MatrixView

#: On every device.
EVERYWHERE = PartitionSpec()  # type: ignore[no-untyped-call]


def never() -> Any:
    """False, which XLA cannot know."""
    return jax.lax.optimization_barrier(jnp.zeros((), bool))  # type: ignore[no-untyped-call]


def filled(
    shape: tuple[int, ...], number: Any, dtype: str, axes: Axes, param: Any, view: MatrixView, taken: Any
) -> Any:
    """A state with one number everywhere, in this shape; `axes` are the axes of its parameter that it has.

    `taken` is the result of `never`; all states of a tree may share it.
    """
    model = _reduced(param, axes, view)
    if model is None or model.size != math.prod(shape):
        return jnp.full(shape, number, dtype)
    model = model.reshape(shape).astype(dtype)
    # XLA gives both arms of an elementwise select one sharding. Only then may it see that one arm is never taken.
    return jax.lax.select(taken, model, jnp.full_like(model, number))


def spec_of(shape: tuple[int, ...], axes: Axes, param: Any, view: MatrixView) -> PartitionSpec | None:
    """The sharding of a state whose parameter lies on a mesh of explicit axes; None where its axes are others."""
    lacking = _lacking(axes, view)
    if lacking is None:
        return None
    like = tuple(1 if i in lacking else n for i, n in enumerate(param.shape))
    if like == shape:
        names = enumerate(jax.typeof(param).sharding.spec)
        return PartitionSpec(*(None if i in lacking else name for i, name in names))  # type: ignore[no-untyped-call]
    return EVERYWHERE if math.prod(like) == math.prod(shape) else None


def _reduced(param: Any, axes: Axes, view: MatrixView) -> Any:
    """A parameter reduced to the axes of its state, and so sharded as the state should be; None as in `_lacking`."""
    lacking = _lacking(axes, view)
    return jnp.max(param, axis=lacking, keepdims=True, initial=0) if lacking else None if lacking is None else param


def _lacking(axes: Axes, view: MatrixView) -> tuple[int, ...] | None:
    """The axes of a parameter that its state lacks; None where the state has none of the parameter's axes."""
    if axes.elementwise:
        return ()
    rows, cols = view.axes
    if (axes.rows is None) == (axes.cols is None):
        return None
    return cols if axes.cols is None else rows
