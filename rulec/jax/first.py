"""The state before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rulec.compiler.view import MatrixView
from rulec.jax.meshes import automatic
from rulec.jax.shards import EVERYWHERE, filled, never, spec_of
from rulec.jax.values import LIBRARY
from rulec.pure import first as pure
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

    arrays: dict[str, dict[int, PartitionSpec]] = {name: {} for name in plan.arrays}
    for name, place, spec in specs:
        arrays[name][place] = EVERYWHERE if spec is None else spec
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
