"""Members on four devices that XLA makes of one CPU, and on one: what was found, as JSON. For a process of its own."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rulec.es import Perturbation
from rulec.jax import es

PERTURBATION = Perturbation("independent", 8, 0.1)
MESH = jax.make_mesh((4,), ("members",))


def loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["first"]) @ params["second"] - y) ** 2)


def report() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    params = {"first": rng.standard_normal((12, 20)), "second": rng.standard_normal((20, 3))}
    params = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), params)
    x, y = (jnp.asarray(rng.standard_normal((40, n)), jnp.float32) for n in (12, 3))
    state = es.init(params, PERTURBATION)

    def fitness(mesh: Any, chunk: int | None) -> Any:
        return jax.jit(lambda *a: es.evaluate(loss, *a[:2], PERTURBATION, *a[2:], mesh=mesh, chunk=chunk))(
            params, state, x, y
        )

    dealt, alone, together = fitness(MESH, 2), fitness(None, 2), fitness(MESH, None)
    rows = es.member_batch(x, PERTURBATION)
    own = es.batched(params, state, PERTURBATION)
    forward = jax.jit(lambda own, rows: jnp.tanh(rows @ own["first"]) @ own["second"])
    split = jax.device_put(rows, NamedSharding(MESH, P("members")))
    return {
        "devices": len(dealt.sharding.device_set),
        "same": bool(np.array_equal(dealt, alone)),
        "together": float(np.abs(together / alone - 1).max()),
        "spread": float(np.std(alone)),
        "rows": float(np.abs(forward(own, split) - forward(own, rows)).max()),
        "row_devices": len(forward(own, split).sharding.device_set),
    }


if __name__ == "__main__":
    print(json.dumps(report()))
