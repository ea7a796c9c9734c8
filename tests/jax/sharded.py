"""Steps over eight devices that XLA makes of one CPU: what was found, as JSON. For a process of its own."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import rulec
import rulec.jax
from tests.jax.explicit import LAYOUTS, layout_of
from tests.jax.muon import in_float32

P = PartitionSpec
MESHES = {
    kind: jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind)) for kind in (AxisType.Auto, AxisType.Explicit)
}
MESH = MESHES[AxisType.Auto]

#: Few, and of full rank: where a matrix is not, the bases of SOAP and GaLore are partly any.
FEW: Mapping[str, tuple[tuple[int, ...], PartitionSpec]] = {"square": ((8, 8), P("x", "y")), "flat": ((16,), P("y"))}

COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(")


def placed(seed: int, mesh: Mesh = MESH, layouts: Mapping[str, Any] = LAYOUTS) -> dict[str, Any]:
    """The same numbers for the same seed, sharded."""
    rng = np.random.default_rng(seed)
    return {
        name: jax.device_put(rng.standard_normal(shape).astype(np.float32), NamedSharding(mesh, spec))
        for name, (shape, spec) in layouts.items()
    }


def runs(rule: str) -> dict[str, list[str]]:
    """What two steps of few leaves lose of shardings, or how they differ from one device, on each kind of mesh."""
    found, hyper = {}, HYPER.get(rule, {})
    for axes, mesh in MESHES.items():
        params, want = placed(0, mesh, FEW), alone(placed(0, mesh, FEW))
        states = rulec.jax.init(rule, params, tags={}), rulec.jax.init(rule, want, tags={})
        for seed in (1, 2):
            grads = placed(seed, mesh, FEW)
            given = {name: grads if kind == "like p" else 1.0 for name, kind in rulec.load(rule).inputs.items()}
            params, first = rulec.jax.step(rule, params, grads, states[0], **hyper, **given, tags={})
            grads, given = alone(grads), {name: x if isinstance(x, float) else alone(x) for name, x in given.items()}
            want, second = rulec.jax.step(rule, want, grads, states[1], **hyper, **given, tags={})
            states = first, second
        found[axes.name] = lost(params, placed(0, mesh, FEW)) + apart(params, want) + apart(*states)
    return found


#: Meshes of eight devices, and ways in which equal matrices lie on them.
EQUAL: Mapping[str, tuple[tuple[int, ...], PartitionSpec]] = {
    "rows of 8": ((8,), P("x", None)), "cols of 8": ((8,), P(None, "x")), "rows of 4, 2": ((4, 2), P("x", None)),
    "both of 4, 2": ((4, 2), P("x", "y")), "joined of 4, 2": ((4, 2), P(("x", "y"), None)),
}  # fmt: skip

#: The products of matrices in compiled code.
PRODUCT = re.compile(r"= (\S+) dot\(")


def equal_matrices(kind: str, count: int, way: str) -> dict[str, Any]:
    """A step of equal matrices: collectives, products on each device, shardings lost, the distance from one device."""
    rule = in_float32()
    sides, spec = EQUAL[way]
    mesh = jax.make_mesh(sides, ("x", "y")[: len(sides)], axis_types=(AxisType[kind],) * len(sides))
    layouts = {f"w{i}": ((64, 32), spec) for i in range(count)}
    params, grads = placed(0, mesh, layouts), placed(1, mesh, layouts)
    state, want, same = (
        rulec.jax.init(rule, params, tags={}),
        alone(params),
        rulec.jax.init(rule, alone(params), tags={}),
    )

    def step(params: Any, grads: Any, state: Any) -> Any:
        return rulec.jax.step(rule, params, grads, state, lr=0.1, tags={})

    made, collectives = compiled(step, params, grads, state)
    for seed in (1, 2):
        grads = placed(seed, mesh, layouts)
        params, state = jax.jit(step)(params, grads, state)
        want, same = jax.jit(step)(want, alone(grads), same)
    pairs = [(np.asarray(params[name]), np.asarray(want[name])) for name in layouts]
    return {
        "collectives": {name: len(found) for name, found in collectives.items()},
        "products": len(PRODUCT.findall(made.as_text())),
        "lost": lost(params, grads) + lost_states(state, grads),
        "distance": max(float(np.abs(a - b).max()) for a, b in pairs),
    }


#: The calls of LAPACK in compiled code: how many matrices each has, and its name.
CALL = re.compile(r'= \(?f64\[(\d+),[^\n]*custom_call_target="lapack_(\w+)_ffi"')


def whole_decompositions(kind: str, rule: str) -> dict[str, Any]:
    """Steps of eight square matrices in float64: calls of LAPACK, collectives, shardings lost, the distance from one
    device as a part of the way that parameters go."""
    sides, spec = ((8,), P("x", None)) if kind == "Auto" else ((4, 2), P("x", "y"))
    mesh = jax.make_mesh(sides, ("x", "y")[: len(sides)], axis_types=(AxisType[kind],) * len(sides))
    layouts = {f"w{i}": ((32, 32), spec) for i in range(8)}

    def wide(seed: int) -> Any:
        return jax.tree.map(lambda x: x.astype("float64"), placed(seed, mesh, layouts))

    with jax.enable_x64(True):
        params, want = wide(0), alone(wide(0))
        start, state, same = want, rulec.jax.init(rule, params, tags={}), rulec.jax.init(rule, want, tags={})
        step = partial(rulec.jax.step, rule, donate=False, backend="jax", **HYPER.get(rule, {}), tags={})
        made, collectives = compiled(step, params, wide(1), state)
        for seed in range(1, 5):
            params, state = step(params, wide(seed), state)
            want, same = step(want, alone(wide(seed)), same)
        triples = [(np.asarray(params[name]), np.asarray(want[name]), np.asarray(start[name])) for name in layouts]
        return {
            "calls": dict(Counter(f"{name} of {count}" for count, name in CALL.findall(made.as_text()))),
            "collectives": {name: len(found) for name, found in collectives.items()},
            "lost": lost(params, wide(0)) + lost_states(state, wide(0)),
            "distance": max(float(np.abs(a - b).max() / np.abs(b - c).max()) for a, b, c in triples),
        }


def resharded(rule: str) -> dict[str, Any]:
    """A run that orbax saves on eight devices and loads on four, and from there on one: how far it is from the run that
    stays, and how many devices its matrix lies on."""
    import orbax.checkpoint as ocp

    meshes = [Mesh(np.array(jax.devices()[:count]), ("x",)) for count in (8, 4, 1)]
    layouts = {"w": ((16, 16), P("x", None)), "b": ((16,), P("x"))}
    step = partial(rulec.jax.step, rule, donate=False, backend="jax", tags={})
    params = stays = placed(0, meshes[0], layouts)
    state = same = rulec.jax.init(rule, params, tags={})
    devices = []
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        for number, mesh in enumerate(meshes):
            if number:
                checkpointer.save(f"{folder}/{number}", {"params": params, "state": state})
                checkpointer.wait_until_finished()
                like = placed(9, mesh, layouts)
                target = {"params": like, "state": rulec.jax.init(rule, like, tags={})}
                loaded = checkpointer.restore(f"{folder}/{number}", target)
                params, state = loaded["params"], loaded["state"]
            for seed in (2 * number, 2 * number + 1):
                params, state = step(params, placed(seed, mesh, layouts), state)
                stays, same = step(stays, placed(seed, meshes[0], layouts), same)
            devices.append(len(params["w"].sharding.device_set))
    return {"devices": devices, "apart": apart(params, stays) + apart(state, same)}


def in_bfloat16() -> float:
    """How far a step of eight equal matrices in bfloat16 is from one device."""
    layouts = {f"w{i}": ((64, 32), P("x", None)) for i in range(8)}
    step = jax.jit(partial(rulec.jax.step, "muon", lr=0.1, backend="jax", tags={}))
    params, grads = placed(0, MESH, layouts), placed(1, MESH, layouts)
    new, _ = step(params, grads, rulec.jax.init("muon", params, tags={}))
    want, _ = step(alone(params), alone(grads), rulec.jax.init("muon", alone(params), tags={}))
    return max(float(np.abs(np.asarray(new[name]) - np.asarray(want[name])).max()) for name in layouts)


def rounding() -> dict[str, float]:
    """How far four steps in float64 are from one device, as a part of the way that parameters go."""
    wide = in_float32()
    large, square = {"w": ((128, 96), P("x", "y"))}, {"w": ((16, 16), P("x", "y"))}
    with jax.enable_x64(True):
        return {
            "muon in float32": distance(wide, large),
            "muon in bfloat16": distance("muon", large),
            "soap of full rank": distance("soap", square),
            "soap of less rank, covariances": distance("soap", {"w": ((16, 8), P("x", "y"))}, ("l", "r")),
        }


def distance(rule: Any, layouts: Mapping[str, Any], states: Sequence[str] = ()) -> float:
    """The largest difference of parameters, or of these states, from those of one device, by how far they went."""
    params = jax.tree.map(lambda x: x.astype("float64"), placed(0, layouts=layouts))
    want = start = alone(params)
    state, want_state = rulec.jax.init(rule, params, tags={}), rulec.jax.init(rule, want, tags={})
    for seed in range(1, 5):
        grads = jax.tree.map(lambda x: x.astype("float64"), placed(seed, layouts=layouts))
        params, state = rulec.jax.step(rule, params, grads, state, donate=False, tags={})
        want, want_state = rulec.jax.step(rule, want, alone(grads), want_state, backend="jax", donate=False, tags={})
    pairs = [(getattr(state, k)["w"], getattr(want_state, k)["w"], 0.0) for k in states]
    sides = pairs or [(params["w"], want["w"], start["w"])]
    return max(float(np.abs(np.asarray(a) - b).max() / np.abs(b - c).max()) for a, b, c in sides)


def alone(tree: Any) -> Any:
    """The same on one device."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)


def lost(arrays: Any, like: Any) -> list[str]:
    """The arrays in the shape of a parameter that are not sharded as it is; a tree that is no such tree has none."""
    found = []
    for name, own in like.items():
        array = arrays.get(name) if isinstance(arrays, dict) else None
        same = array is not None and array.shape == own.shape
        if same and not array.sharding.is_equivalent_to(own.sharding, own.ndim):
            found.append(f"{name}: {array.sharding}")
    return found


def lost_states(state: Any, params: Any) -> list[str]:
    """The same of every state."""
    return [
        f"{field}.{text}" for field, value in zip(state._fields, state, strict=True) for text in lost(value, params)
    ]


def compiled(train: Callable[..., Any], *arguments: Any) -> tuple[Any, dict[str, list[str]]]:
    """A donating step compiled, and the results of its collectives by their kind."""
    made = jax.jit(train, donate_argnums=(0, 2)).lower(*arguments).compile()
    found: dict[str, list[str]] = {}
    for line in made.as_text().splitlines():
        if match := COLLECTIVE.search(line):
            found.setdefault(match[1], []).append(line.split(" = ")[1][: match.start()].split(match[0])[0])
    return made, found


#: Shampoo's roots of a matrix of low rank are made of rounding where eps is not far above it.
HYPER = {"shampoo": {"eps": 1.0}}


#: The leaves that tell what a rule does, where it is not all of them.
LEAVES = dict.fromkeys(("adamw", "lion", "nadam", "schedule_free_adamw", "prodigy"), ("both", "flat")) | {
    "muon": ("both", "conv_in"), "shampoo": ("rows", "conv_out"), "novograd": ("joined", "flat"),
    "came": ("both", "conv_out"), "sm3": ("joined", "conv_in"),
}  # fmt: skip


def report(rule: str, way: str) -> dict[str, Any]:
    """How a rule does: shardings kept by its state and its step, collectives, and how far from one device."""
    hyper, layouts = HYPER.get(rule, {}), {name: LAYOUTS[name] for name in LEAVES.get(rule, LAYOUTS)}
    transformation = rulec.jax.transform(rule, **hyper, tags={})

    def step(params: Any, grads: Any, state: Any) -> Any:
        if way == "step":
            return rulec.jax.step(rule, params, grads, state, **hyper, tags={})
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, grads = placed(0, layouts=layouts), placed(1, layouts=layouts)
    state = rulec.jax.init(rule, params, tags={})
    traced = jax.jit(lambda p: rulec.jax.init(rule, p, tags={}))(params)
    _, collectives = compiled(step, params, grads, state)
    want, want_state = alone(params), rulec.jax.init(rule, alone(params), tags={})
    first = lost_states(state, params) + lost_states(traced, params)
    donating = jax.jit(step, donate_argnums=(0, 2))
    for _ in range(2):
        params, state = donating(params, grads, state)
        want, want_state = donating(want, alone(grads), want_state)
    return {
        "first": first,
        "after": lost(params, grads) + lost_states(state, grads),
        "factors": {
            field: {name: str(array.sharding.spec) for name, array in value.items() if array is not None}
            for field, value in zip(state._fields, state, strict=True)
            if isinstance(value, dict)
        },
        "collectives": collectives,
        "apart": apart(params, want) + apart(state, want_state),
    }


def apart(tree: Any, other: Any) -> list[str]:
    """The leaves that differ by more than the order of sums explains."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(other), strict=True)
    return [
        jax.tree_util.keystr(path)
        for (path, a), b in pairs
        if not np.allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-5 * (1 + float(np.abs(b).max())))
    ]


def eager(rule: str) -> list[str]:
    """What a step that nobody else compiles loses of shardings."""
    params, grads = placed(0), placed(1)
    state = rulec.jax.init(rule, params, tags={})
    params, state = rulec.jax.step(rule, params, grads, state, tags={})
    return lost(params, grads) + lost_states(state, grads)


def factors(rule: str) -> dict[str, list[str]]:
    """How states beside a parameter by rows and columns are sharded at first, and after a step, on each kind of mesh.

    The last is how far two steps are from one device.
    """
    layouts, found = {"w": ((64, 32), P("x", "y"))}, {}
    for axes, mesh in MESHES.items():
        params, want = placed(0, mesh, layouts), alone(placed(0, mesh, layouts))
        state, same = rulec.jax.init(rule, params, tags={}), rulec.jax.init(rule, want, tags={})
        found[axes.name] = [layout_of(state)]
        for seed in (1, 2):
            grads = placed(seed, mesh, layouts)
            params, state = rulec.jax.step(rule, params, grads, state, **HYPER.get(rule, {}), tags={})
            want, same = rulec.jax.step(rule, want, alone(grads), same, backend="jax", **HYPER.get(rule, {}), tags={})
        found[axes.name] += [layout_of(state), " ".join(apart(params, want))]
    return found


def in_shard_map(rule: str) -> list[str]:
    """Where a step of each device's own part differs from that of the whole."""
    params, grads = placed(0), placed(1)
    specs = {name: spec for name, (_, spec) in LAYOUTS.items()}
    state = rulec.jax.init(rule, params, tags={})
    of_state = type(state)(P(), *(specs if isinstance(x, dict) else P() for x in state[1:]))

    def step(params: Any, grads: Any, state: Any) -> Any:
        return rulec.jax.step(rule, params, grads, state, tags={})

    mapped = jax.shard_map(step, mesh=MESH, in_specs=(specs, specs, of_state), out_specs=(specs, of_state))
    first = jax.shard_map(lambda p: rulec.jax.init(rule, p, tags={}), mesh=MESH, in_specs=(specs,), out_specs=of_state)
    made, collectives = compiled(mapped, params, grads, jax.jit(first)(params))
    found = made(params, grads, state)
    want = jax.jit(step)(alone(placed(0)), alone(grads), rulec.jax.init(rule, alone(placed(0)), tags={}))
    return apart(found, want) + list(collectives)


#: Blocks of a row each, blocks over rows, and blocks over devices.
CODED: Mapping[str, tuple[tuple[int, ...], PartitionSpec]] = {
    "rows": ((64, 512), P("x")), "both": ((64, 512), P("x", "y")), "joined": ((64, 96), P("x")),
    "cols": ((64, 512), P(None, "x")), "flat": ((8192,), P("y")),
}  # fmt: skip


def coded(words: Any) -> dict[str, Any]:
    """Two steps of states in codes on each kind of mesh: shardings lost, collectives, codes unlike one device's."""

    def step(params: Any, grads: Any, state: Any) -> Any:
        return rulec.jax.step("adamw", params, grads, state, lr=1e-2)

    found = {}
    for axes, mesh in MESHES.items():
        params, want = placed(0, mesh, CODED), alone(placed(0, mesh, CODED))
        state, same = (rulec.jax.init("adamw", tree, state_dtype=words) for tree in (params, want))
        _, collectives = compiled(step, {"joined": params["joined"]}, {"joined": params["joined"]}, of_one(state))
        for seed in (1, 2):
            grads = placed(seed, mesh, CODED)
            params, state = rulec.jax.step("adamw", params, grads, state, lr=1e-2)
            want, same = rulec.jax.step("adamw", want, alone(grads), same, lr=1e-2)
        like = placed(0, mesh, CODED)
        coded = {field: getattr(state, field) for field in ("m", "v")}
        codes, others = (
            [numbers(x) for field in ("m", "v") for _, x in sorted(getattr(each, field).items())]
            for each in (state, same)
        )
        found[axes.name] = {
            "lost": lost(params, like) + [text for tree in coded.values() for text in larger(tree, like)],
            "collectives": collectives,
            "unlike": max(map(share_unlike, codes, others)),
            "apart": apart(params, want),
        }
    return found


def unbiased() -> dict[str, list[str]]:
    """Two steps of states that are rounded at random on each kind of mesh: states unlike one device's, by path."""
    found: dict[str, list[str]] = {}
    for axes, mesh in MESHES.items():
        params, want = placed(0, mesh), alone(placed(0, mesh))
        state, same = (rulec.jax.init("adamw", tree, state_dtype="bfloat16_sr") for tree in (params, want))
        for seed in (1, 2):
            grads = placed(seed, mesh)
            params, state = rulec.jax.step("adamw", params, grads, state, lr=1e-2, seed=70000)
            want, same = rulec.jax.step("adamw", want, alone(grads), same, lr=1e-2, seed=70000)
        pairs = zip(jax.tree.leaves_with_path(state), jax.tree.leaves(same), strict=True)
        unlike = [jax.tree_util.keystr(path) for (path, x), y in pairs if not np.array_equal(np.asarray(x), y)]
        values = {name: leaf.values for name, leaf in state.v.items()}
        found[axes.name] = unlike + lost(values, placed(0, mesh))
    return found


def numbers(coded: Any) -> Any:
    """Each code by itself."""
    codes = np.asarray(coded.codes)
    return np.stack([codes >> 4, codes & 15]) if coded.format.bits == 4 else codes


def larger(coded: Mapping[str, Any], like: Mapping[str, Any]) -> list[str]:
    """The codes and scales with more elements on a device than of their parameter's sharding follows."""
    found = []
    for name, param in like.items():
        form = coded[name].format
        for what, array in (("codes", coded[name].codes), ("scales", coded[name].scales)):
            there = param.sharding.shard_shape(param.shape)
            shorter = param.shape[-1] // max(1, math.prod(param.shape) // array.size)
            divided = array.ndim == param.ndim and there[-1] * shorter % param.shape[-1] == 0
            last = there[-1] * shorter // param.shape[-1] if divided else shorter
            most = math.prod(there[:-1]) * last if array.ndim == param.ndim else array.size
            size = math.prod(array.sharding.shard_shape(array.shape))
            if size > most:
                found.append(f"{form.key} {what} of {name}: {size} of {array.size}, not {most}")
    return found


def of_one(state: Any) -> Any:
    """The part of a state that is for the leaf `joined`."""
    return type(state)(*({"joined": x["joined"]} if isinstance(x, dict) else x for x in state))


def share_unlike(codes: Any, others: Any) -> float:
    """The share of codes that differ; 1 where one differs by more than one."""
    distance = np.abs(np.asarray(codes).astype(int) - np.asarray(others).astype(int))
    return 1.0 if distance.max() > 1 else float(np.mean(distance > 0))


def main() -> None:
    """Prints everything that was asked for."""
    nothing: dict[str, Any] = {
        key: [] for key in ("factors", "runs", "eager", "shard_map", "coded", "equal", "whole", "orbax")
    }
    nothing |= {"rules": {}, "rounding": False, "unbiased": False, "bfloat16": False}
    asked = nothing | json.loads(sys.argv[1])
    found: dict[str, Any] = {
        "devices": jax.device_count(),
        "largest": max(math.prod(shape) for shape, _ in LAYOUTS.values()),
        "rules": {rule: report(rule, way) for rule, way in asked["rules"].items()},
        "runs": {rule: runs(rule) for rule in asked["runs"]},
        "rounding": rounding() if asked["rounding"] else {},
        "eager": {rule: eager(rule) for rule in asked["eager"]},
        "shard_map": {rule: in_shard_map(rule) for rule in asked["shard_map"]},
        "coded": [coded(words) for words in asked["coded"]],
        "factors": {rule: factors(rule) for rule in asked["factors"]},
        "equal": [equal_matrices(*each) for each in asked["equal"]],
        "whole": [whole_decompositions(kind, rule) for kind, rule, _ in asked["whole"]],
        "orbax": {rule: resharded(rule) for rule in asked["orbax"]},
        "bfloat16": in_bfloat16() if asked["bfloat16"] else 0.0,
        "unbiased": unbiased() if asked["unbiased"] else {},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
