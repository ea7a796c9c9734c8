"""The state before the first step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rulec.compiler.ir import Axes
from rulec.compiler.view import MatrixView
from rulec.formats import Format
from rulec.functional import init as pure
from rulec.functional.plan import StepPlan
from rulec.functional.quantized import Coded, Unbiased, shapes_by_rows
from rulec.functional.values import Hypers, Values
from rulec.jax.library import LIBRARY, automatic
from rulec.runtime.storage.allocator import StateSpec


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
            for place, view in zip(bucket.places, bucket.views, strict=True):
                arrays[name][place] = _coded_spec(form, tuple(view.shape), arrays[name][place], params[place])
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
    model = _outer(param, shape, view) if _lacking(axes, view) is None else _reduced(param, axes, view)
    if model is None or model.size != math.prod(shape):
        return jnp.full(shape, number, dtype)
    model = model.reshape(shape).astype(dtype)
    # XLA gives both arms of an elementwise select one sharding. Only then may it see that one arm is never taken.
    return jax.lax.select(taken, model, jnp.full_like(model, number))


def _coded_spec(form: Format, shape: tuple[int, ...], spec: Any, param: Any) -> Coded:
    """The sharding of codes and scales: as of their state, but whole rows where shards end inside of a block."""
    sizes = jax.typeof(param).sharding.mesh.shape
    codes, scales = shapes_by_rows(form, shape)
    return Coded(_divided(spec, shape, codes, sizes), _divided(spec, shape, scales, sizes), form)


def _divided(spec: Any, shape: tuple[int, ...], like: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """The sharding of an array with the axes of a tensor, the last of them shorter; `sizes` are the mesh's."""
    if len(like) != len(shape) or len(spec) < len(shape):
        return spec if len(like) == len(shape) else EVERYWHERE  # the last axis is not sharded
    names = spec[-1] if isinstance(spec[-1], tuple) else (spec[-1],) if spec[-1] else ()
    whole = like[-1] % math.prod(sizes[name] for name in names) == 0
    return PartitionSpec(*spec[:-1], spec[-1] if whole else None)  # type: ignore[no-untyped-call]


def spec_of(shape: tuple[int, ...], axes: Axes, param: Any, view: MatrixView) -> PartitionSpec | None:
    """The sharding of a state whose parameter lies on a mesh of explicit axes; None where its axes are others."""
    lacking = _lacking(axes, view)
    if lacking is None:
        return _factor_spec(_sides(shape, view), jax.typeof(param).sharding.spec)
    like = tuple(1 if i in lacking else n for i, n in enumerate(param.shape))
    if like == shape:
        names = enumerate(jax.typeof(param).sharding.spec)
        return PartitionSpec(*(None if i in lacking else name for i, name in names))  # type: ignore[no-untyped-call]
    return EVERYWHERE if math.prod(like) == math.prod(shape) else None


def _reduced(param: Any, axes: Axes, view: MatrixView) -> Any:
    """A parameter reduced to the axes of its state, and so sharded as the state should be; None as in `_lacking`."""
    lacking = _lacking(axes, view)
    return jnp.max(param, axis=lacking, keepdims=True, initial=0) if lacking else None if lacking is None else param


def _sides(shape: tuple[int, ...], view: MatrixView) -> list[tuple[int, ...]]:
    """For each side of a factor the axes of its parameter that it has, none twice; empty for a side of others."""
    if len(shape) != 2 or view.batch != 1:
        return []
    (rows, cols), (height, width) = view.axes, shape
    first = rows if height == view.rows else cols if height == view.cols else ()
    second = cols if width == view.cols else rows if width == view.rows else ()
    return [first, () if second == first else second]


def _factor_spec(sides: Sequence[tuple[int, ...]], names: Any) -> PartitionSpec | None:
    """The sharding of a factor; joined axes that are sharded within are on every device."""
    if not any(sides):
        return None
    whole = (bool(side) and all(names[i] is None for i in side[1:]) for side in sides)
    return PartitionSpec(*(names[side[0]] if is_whole else None for side, is_whole in zip(sides, whole, strict=True)))  # type: ignore[no-untyped-call]


def _outer(param: Any, shape: tuple[int, ...], view: MatrixView) -> Any:
    """An array in the shape of a factor whose sides are sharded as the parameter's; None on one device."""
    sides = _sides(shape, view)
    if not any(sides) or jax.typeof(param).sharding.mesh.size == 1:
        return None
    model = jnp.zeros(shape, param.dtype)
    for place, side in enumerate(sides):
        if side:
            others = tuple(i for i in range(param.ndim) if i not in side)
            vector = jnp.max(param, axis=others, initial=0).reshape(-1)
            model = model + (vector[:, None] if place == 0 else vector)
    return model


def _lacking(axes: Axes, view: MatrixView) -> tuple[int, ...] | None:
    """The axes of a parameter that its state lacks; None where the state has none of the parameter's axes."""
    if axes.elementwise:
        return ()
    if view.blocks:
        return None
    if view.letters:
        return tuple(d for d, letter in enumerate(view.letters) if letter not in axes.letters)
    rows, cols = view.axes
    if (axes.rows is None) == (axes.cols is None):
        return None
    return cols if axes.cols is None else rows
