"""Shardings as types: what a step says of its results where the axes of a mesh are explicit, on no device at all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import rulec
import rulec.jax

P = PartitionSpec
MESH = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Explicit))

#: The sharding that is asked for, in the text of a traced function.
SPEC = re.compile(r"sharding_constraint\[.*?spec=(P\(.*?\))\)\n", re.DOTALL)

#: Parameters and how they are sharded: by rows, columns, both, neither; vectors; kernels of convolutions.
LAYOUTS: Mapping[str, tuple[tuple[int, ...], PartitionSpec]] = {
    "both": ((16, 8), P("x", "y")),
    "cols": ((16, 8), P(None, "y")),
    "conv_in": ((8, 4, 3, 3), P(None, "y")),
    "conv_out": ((8, 4, 3, 3), P("x")),
    "flat": ((16,), P("x")),
    "everywhere": ((8, 8), P()),
    "joined": ((16, 8), P(("x", "y"))),
    "rows": ((16, 8), P("x")),
}


def traced(rule: str) -> list[str]:
    """What a rule loses of shardings on explicit axes, where they are types: without a number being worked out."""
    inputs = rulec.load(rule).inputs
    params = {n: jax.ShapeDtypeStruct(s, "float32", sharding=NamedSharding(MESH, p)) for n, (s, p) in LAYOUTS.items()}
    given = {name: params if kind == "like p" else jnp.float32(1) for name, kind in inputs.items()}

    def both(params: Any, inputs: Any) -> Any:
        tx, state = rulec.jax.transform(rule, tags={}), rulec.jax.init(rule, params, tags={})
        updates, _ = tx.update(params, state, params, **inputs)
        return state, updates, rulec.jax.step(rule, params, params, state, **inputs, tags={})

    first, updates, (new, after) = jax.eval_shape(both, params, given)
    found = untyped(updates, params) + untyped(new, params)
    for state in (first, after):
        for field, value in zip(state._fields, state, strict=True):
            found += [f"{field}.{text}" for text in untyped(value, params)]
    return found


def constraints(rule: str, count: int, sides: tuple[int, ...], kind: AxisType, shape: tuple[int, ...]) -> list[str]:
    """The shardings that a step asks of XLA for equal parameters that lie by rows on a mesh of any devices."""
    mesh = AbstractMesh(sides, ("x", "y")[: len(sides)], axis_types=(kind,) * len(sides))
    like = jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, P(*[None] * (len(shape) - 2), "x")))
    params = {f"w{i}": like for i in range(count)}

    def step(params: Any) -> Any:
        return rulec.jax.step(rule, params, params, rulec.jax.init(rule, params, tags={}), tags={})

    return SPEC.findall(str(jax.make_jaxpr(step)(params)))


def first_layout(rule: str) -> str:
    """How states beside a parameter by rows and columns are sharded before the first step."""
    both = jax.ShapeDtypeStruct((64, 32), "float32", sharding=NamedSharding(MESH, P("x", "y")))
    return layout_of(jax.eval_shape(lambda p: rulec.jax.init(rule, p, tags={}), {"w": both}))


def codes_layout(form: str, spec: tuple[Any, ...], shape: tuple[int, ...]) -> list[tuple[str, str]]:
    """The axes of a mesh at the sides of codes and of scales, before the first step and after it."""
    like = jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(MESH, P(*spec)))

    def both(param: Any) -> Any:
        first = rulec.jax.init("lion", param, state_dtype=form)
        return first.m, rulec.jax.step("lion", param, param, first)[1].m

    return [(_sides(coded.codes), _sides(coded.scales)) for coded in jax.eval_shape(both, like)]


def _sides(array: Any) -> str:
    names = (*array.sharding.spec, *[None] * array.ndim)[: array.ndim]
    return ",".join("".join(name) if isinstance(name, tuple) else name or "-" for name in names)


def layout_of(state: Any) -> str:
    """The axes of a mesh at the sides of each state of the leaf `w`."""
    arrays = {name: field["w"] for name, field in state._asdict().items() if isinstance(field, dict)}
    sides = {name: (*x.sharding.spec, *[None] * x.ndim)[: x.ndim] for name, x in arrays.items() if x is not None}
    return " ".join(f"{name}:{','.join(axis or '-' for axis in sides[name])}" for name in sides)


def untyped(arrays: Any, like: Any) -> list[str]:
    """The arrays in the shape of a parameter whose type does not say that they are sharded as it is."""
    own = {name: array for name, array in arrays.items() if array is not None} if isinstance(arrays, dict) else {}
    return [
        f"{name}: {array.sharding}"
        for name, array in own.items()
        if array.shape == like[name].shape
        and array.sharding.spec != P(*like[name].sharding.spec, *[None] * (array.ndim - len(like[name].sharding.spec)))
    ]
