"""Steps on a mesh over two processes, which speak over loopback: what was found, as JSON. For a process of its own.

Arguments: the number of this process, and the port of the first.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import rulec.jax
from tests.jax.muon import in_float32

#: Equal matrices, one alone in its shape, and a vector.
SHAPES = {**{f"w{i}": (32, 16) for i in range(4)}, "alone": (16, 16), "flat": (16,)}


def tree(seed: int, mesh: Mesh | None) -> dict[str, Any]:
    """The same numbers in all processes, by rows on a mesh, or whole on one device of this process."""
    rng = np.random.default_rng(seed)
    whole = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    if mesh is None:
        return {name: jnp.asarray(x) for name, x in whole.items()}
    rows = NamedSharding(mesh, PartitionSpec("x"))  # type: ignore[no-untyped-call]
    return {name: jax.make_array_from_callback(x.shape, rows, x.__getitem__) for name, x in whole.items()}


def trained(rule: Any, mesh: Mesh | None) -> tuple[Any, Any]:
    """Parameters and state after three steps."""
    params = tree(0, mesh)
    state = rulec.jax.init(rule, params, tags={})
    for seed in (1, 2, 3):
        params, state = rulec.jax.step(rule, params, tree(seed, mesh), state, lr=0.1, backend="jax", tags={})
    return params, state


def distance(arrays: Any, whole: Any) -> float:
    """The largest difference of this process's shards from the same part of whole arrays."""
    pairs = zip(jax.tree.leaves(arrays), jax.tree.leaves(whole), strict=True)
    shards = ((shard, np.asarray(x)) for array, x in pairs for shard in array.addressable_shards)
    return max(float(np.abs(np.asarray(shard.data) - x[shard.index]).max()) for shard, x in shards)


def main() -> None:
    """Prints the distances from one process on each kind of mesh, and how many devices there are."""
    number, port = map(int, sys.argv[1:])
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)
    found: dict[str, Any] = {"devices": [jax.local_device_count(), jax.device_count()]}
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
        for name, rule in {"adamw": "adamw", "muon": in_float32()}.items():
            over, alone = trained(rule, mesh), trained(rule, None)
            rows = {array.addressable_shards[0].data.shape[0] for array in over[0].values()}
            found[f"{name} on {kind.name}"] = {"distance": distance(over, alone), "rows": sorted(rows)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
