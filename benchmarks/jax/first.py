"""The time of the first call of a step in JAX, traced and compiled, each in a process of its own."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from benchmarks.result import Row
from rulec.errors import RulecError

LEAVES, ELEMENTS = 150, 1000
QUICK_LEAVES = 3

#: Times optax's speed.
TARGET = 1.0

#: Imports and compilation before the clock begins.
_BEFORE = """
import sys, time
import jax, jax.numpy as jnp, optax, rulec.jax
params = {{f"layer{{i}}": jnp.ones({elements}) for i in range({leaves})}}
grads = {{name: p + 1 for name, p in params.items()}}
jax.block_until_ready(jax.jit(lambda p: jax.tree.map(lambda x: x * 2, p))(params))
"""

_OPTAX = """
optimizer = optax.adamw(1e-3)
state = optimizer.init(params)
"""

_OURS = """
optimizer = rulec.jax.adamw(1e-3)
state = optimizer.init(params)
"""

_JITTED = """
def update(params, state, grads):
    changes, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, changes), state
step = jax.jit(update, donate_argnums=(0, 1))
begin = time.perf_counter()
jax.block_until_ready(step(params, state, grads))
print(time.perf_counter() - begin)
"""

_STEP = """
state = rulec.jax.init("adamw", params)
begin = time.perf_counter()
jax.block_until_ready(rulec.jax.step("adamw", params, grads, state, lr=1e-3))
print(time.perf_counter() - begin)
"""

PROGRAMS = {"rulec.jax.step": _STEP, "rulec.jax.adamw under jit": _OURS + _JITTED, "optax": _OPTAX + _JITTED}


def rows(quick: bool, rounds: int) -> list[Row]:
    """The speed of our first calls, in times of optax's; by turns, in new processes."""
    leaves = QUICK_LEAVES if quick else LEAVES
    before = _BEFORE.format(leaves=leaves, elements=ELEMENTS)
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(rounds):
        for name, program in PROGRAMS.items():
            seconds[name].append(_seconds(before + program))
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return [
        Row(
            f"adamw, {leaves} leaves of {ELEMENTS:,}", f"first call of {name}, times as fast as optax's",
            medians["optax"] / medians[name], TARGET, detail={"seconds": medians[name], "optax": medians["optax"]},
        )
        for name in PROGRAMS if name != "optax"
    ]  # fmt: skip


def _seconds(program: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", program], env=dict(os.environ), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RulecError(f"a process that measures a first call in JAX failed: {last}")
    return float(done.stdout)
