"""Statistics of sharded steps over eight devices that XLA makes of one CPU, as JSON. For a process of its own."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import rulec.jax

WATCH = {
    "u": "norm(update)", "rows": 'max(abs(update), per="row")', "all": 'norm(g, per="model")', "t": "1*t",
    "mean": "mean(abs(update))",
}  # fmt: skip
SPECS = {"w": PartitionSpec("x", "y"), "v": PartitionSpec("y")}


def reports(rule: str, kind: AxisType) -> dict[str, Any]:
    """The largest relative distance of each statistic to that of one device, for a step and an update."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    rng = np.random.default_rng(0)
    alone = {"w": jnp.asarray(rng.standard_normal((16, 8)), jnp.float32), "v": jnp.arange(1.0, 17.0)}
    sharded = {key: jax.device_put(x, NamedSharding(mesh, SPECS[key])) for key, x in alone.items()}
    first, second = (_step(rule, params) for params in (alone, sharded))
    third = _update(rule, sharded)
    return {name: max(_distance(first[name], other[name]) for other in (second, third)) for name in WATCH}


def _step(rule: str, params: Any) -> Any:
    state = rulec.jax.init(rule, params)
    return rulec.jax.step(rule, params, _gradients(params), state, lr=0.1, donate=False, watch=WATCH)[2]


def _update(rule: str, params: Any) -> Any:
    tx = rulec.jax.transform(rule, lr=0.1, watch=WATCH)
    return rulec.jax.statistics(jax.jit(tx.update)(_gradients(params), tx.init(params), params)[1])


def _gradients(params: Any) -> Any:
    return jax.tree.map(lambda x: jnp.sin(3 * x) + 1.5, params)


def _distance(a: Any, b: Any) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.max(np.abs(np.asarray(y) / np.asarray(x) - 1))) for x, y in pairs)


if __name__ == "__main__":
    cases = [("adamw", AxisType.Auto), ("lamb", AxisType.Explicit)]
    print(json.dumps({rule: reports(rule, kind) for rule, kind in cases}))
