"""The state before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rulec.jax.meshes import automatic
from rulec.jax.plan import Bucket, StepPlan
from rulec.jax.shards import EVERYWHERE, filled, never, spec_of
from rulec.jax.values import LIBRARY, Hypers, Values, evaluated
from rulec.language.node import Node, Op


def first_values(plan: StepPlan, params: Sequence[Any], hyper: Hypers, number_dtype: str) -> Values:
    """The state before the first step; on a mesh of explicit axes sharded as its parameters are."""
    specs = [
        (s.name, place, spec_of(shape, s.axes, params[place], view))
        for b in plan.buckets
        for s, place, view, shape in b.state_shapes()
    ]
    if all(spec is None for _, _, spec in specs):
        return _first_values(plan, params, hyper, number_dtype)  # no state is sharded

    def first(params: Sequence[Any], hyper: Hypers) -> Any:
        return tuple(_first_values(plan, params, hyper, number_dtype))

    arrays: dict[str, dict[int, PartitionSpec]] = {name: {} for name in plan.arrays}
    for name, place, spec in specs:
        arrays[name][place] = EVERYWHERE if spec is None else spec
    of_numbers = dict.fromkeys(plan.numbers, EVERYWHERE)
    return Values(*automatic(first, ([*params], hyper), (EVERYWHERE, arrays, of_numbers)))


def _first_values(plan: StepPlan, params: Sequence[Any], hyper: Hypers, number_dtype: str) -> Values:
    count = jnp.zeros((len(plan.leaves),) if plan.own_counts else (), jnp.int32)
    values = Values(count, {name: {} for name in plan.arrays})
    numbers: dict[str, dict[int, Any]] = {name: {} for name in plan.numbers}
    taken = never()
    for bucket in plan.buckets:
        for i, place in enumerate(bucket.places):
            _first_of(plan, bucket, i, params[place], hyper[bucket.groups[i]], values, numbers, taken)
    for name, level in plan.numbers.items():
        by_place = numbers[name]
        if level == "tensor":
            values.numbers[name] = jnp.stack([by_place[place] for place in plan.having[name]]).astype(number_dtype)
            continue
        by_group = {group: by_place[place] for place, group in _groups(plan, name)}
        any_group = next(iter(by_group.values()))
        whole = [by_group.get(group, any_group) for group in range(plan.groups if level == "group" else 1)]
        vector = jnp.stack(whole).astype(number_dtype)
        values.numbers[name] = vector if level == "group" else vector[0]
    return values


def _groups(plan: StepPlan, name: str) -> list[tuple[int, int]]:
    """The leaves with a state, each with its group; of a state of the model one leaf, with group 0."""
    pairs = [(p, g) for b in plan.buckets for p, g in zip(b.places, b.groups, strict=True) if p in plan.having[name]]
    return pairs if plan.numbers[name] == "group" else [(min(pairs)[0], 0)]


def _first_of(
    plan: StepPlan, bucket: Bucket, i: int, param: Any, hyper: Mapping[str, Any], values: Values,
    numbers: Mapping[str, dict[int, Any]], taken: Any,
) -> None:  # fmt: skip
    place, facts = bucket.places[i], bucket.facts[i]
    compute = bucket.layout.compute

    def leaf(value: Node) -> Any:
        if value.op is Op.LOAD:
            return param.astype(compute)
        return _leaf(value, hyper, facts)

    for spec in bucket.specs:
        shape = spec.shape(bucket.views[i], bucket.static, facts)
        if spec.copies_parameter:
            array = jnp.array(param, spec.dtype)
        else:
            start = evaluated([spec.init], leaf)[spec.init]
            if spec.reads_parameter:
                array = jnp.array(start, spec.dtype)
            else:
                array = filled(shape, start, spec.dtype, spec.axes, param, bucket.views[i], taken)
        values.arrays[spec.name][place] = array
    for level in ("tensor", "group", "model"):
        for name in plan.states_of(bucket, level):
            init = bucket.program.buffer(name).init
            assert init is not None
            numbers[name][place] = jnp.asarray(evaluated([init], leaf)[init], jnp.float64).reshape(())


def _leaf(value: Node, hyper: Mapping[str, Any], facts: Mapping[str, float]) -> Any:
    if value.op is Op.CONST:
        return LIBRARY.constant(float(value.arg))  # type: ignore[arg-type]
    number = facts[str(value.arg)] if value.op is Op.FACT else hyper[str(value.arg)]
    return jnp.asarray(number, jnp.float64)
