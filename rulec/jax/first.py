"""The state before the first step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rulec.compiler.ir import Axes
from rulec.compiler.view import MatrixView
from rulec.jax.library import LIBRARY
from rulec.jax.xla import automatic
from rulec.pure import first as pure
from rulec.pure.codes import Coded, Unbiased
from rulec.pure.plan import StepPlan
from rulec.pure.values import Hypers, Values
from rulec.runtime.state import StateSpec


def first_values(plan: StepPlan, params: Sequence[Any], hyper: Hypers, number_dtype: str) -> Values:
    """The state before the first step; on a mesh of explicit axes sharded as its parameters are."""
    specs = [
        (s.name, place, spec_of(shape, s.axes, params[place], view))
        for b in plan.buckets
        for s, place, view, shape in b.state_shapes()
    ]
    if all(spec is None for _, _, spec in specs):
        return _first_values(plan, params, hyper, number_dtype)  # no state has axes of its parameter

    def first(params: Sequence[Any], hyper: Hypers) -> Any:
        return tuple(_first_values(plan, params, hyper, number_dtype))

    arrays: dict[str, dict[int, Any]] = {name: {} for name in plan.arrays}
    for name, place, spec in specs:
        arrays[name][place] = EVERYWHERE if spec is None else spec
    for bucket in plan.buckets:
        for name, form in bucket.formats.items():
            for place in bucket.places:
                codes = arrays[name][place] if form.bits == 8 else EVERYWHERE
                arrays[name][place] = Coded(codes, EVERYWHERE, form)
        for name in bucket.program.memory.unbiased & arrays.keys():
            arrays[name].update((place, Unbiased(arrays[name][place])) for place in bucket.places)
    of_numbers = dict.fromkeys(plan.numbers, EVERYWHERE)
    return Values(*automatic(first, ([*params], hyper), (EVERYWHERE, arrays, of_numbers)))


def _first_values(plan: StepPlan, params: Sequence[Any], hyper: Hypers, number_dtype: str) -> Values:
    taken = never()

    def stored(spec: StateSpec, value: Any, shape: tuple[int, ...], param: Any, view: MatrixView) -> Any:
        if spec.reads_parameter:
            return jnp.array(value, spec.dtype)
        return filled(shape, value, spec.dtype, spec.axes, param, view, taken)

    count = jnp.zeros((len(plan.leaves),) if plan.own_counts else (), jnp.int32)
    return pure.first_values(plan, params, hyper, number_dtype, Values(count), LIBRARY, stored)


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
