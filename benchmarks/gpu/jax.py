"""Steps in JAX on the GPU, `rulec.jax.step` beside optax under jit with donated arrays: a large array, and many leaves.

JAX allocates memory only as it is needed: torch is in the same process.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Finding, Note, Part
from benchmarks.gpu.rules import OF_COPY, QUICK_ROUNDS, SHARE, STAGES, bytes_moved
from benchmarks.gpu.tensors import FULL, QUICK
from benchmarks.jax.measure import OF_MANY
from benchmarks.jax.steps import Step, called, ours, theirs, tree
from benchmarks.result import Row
from rulec.tools.compare.measure import interleaved

RULES = ("adamw", "lion", "lamb")
ROUNDS = 20

#: Rules that step many leaves too, how many, and the elements of each.
OF_LEAVES = ("adamw", "lion")
LEAVES, QUICK_LEAVES, ELEMENTS = 1000, 5, 1000

#: Steps that are handed over before the host waits for them, so that it is ahead, as in training.
TOGETHER = 10

AS_FAST = "step in JAX, times as fast as"
PACKED = "step in JAX with packed states, times as fast as"


def parts(only: Sequence[str]) -> list[Part]:
    """Each rule; none where JAX is not installed."""
    names = [name for name in RULES if not only or name in only]
    if not all(importlib.util.find_spec(package) for package in ("jax", "optax")):
        return []
    large = [Part(f"{name} in JAX at 100 Mi", rule, (name,), seconds=90.0) for name in names]
    many = [name for name in names if name in OF_LEAVES]
    return [*large, *(Part(f"{name} in JAX of 1000 leaves", leaves, (name,), seconds=90.0) for name in many)]


def missing(only: Sequence[str]) -> list[str]:
    """A note where JAX or optax is not installed."""
    return [] if parts(only) or (only and not {*only} & {*RULES}) else ["jax and optax, to step in, are not installed"]


def rule(bench: Bench, name: str) -> Iterator[Finding]:
    """A rule's steps, and optax's, by the host's clock from a device at rest to one at rest, as JAX offers no events.

    A rule with reductions is compared with a copy of its stages' bytes, without a target.
    """
    hidden = unseen(bench, f"{name} in JAX")
    if hidden is not None:
        yield hidden
        return
    elements = QUICK if bench.quick else FULL
    contenders = _contenders(name, elements)
    times = interleaved(contenders, QUICK_ROUNDS if bench.quick else ROUNDS)
    flat = name != "lamb"
    moved = bytes_moved(name, (elements,) if flat else _shape(elements))
    share = times.ratio("copy", "step") * moved / (8 * elements)
    each = {what: taken / TOGETHER for what, taken in times.medians().items()}
    detail = {**each, "bytes": moved, "scatter": times.quartiles("copy", "step")}
    subject = f"{name}, float32, in JAX"
    yield Row(subject, SHARE if flat else STAGES, share, OF_COPY if flat else None, detail=detail)
    detail = {**each, "scatter": times.quartiles("optax", "step")}
    yield Row(subject, f"{AS_FAST} optax.{called(name)}", times.ratio("optax", "step"), 1.0, detail=detail)


def unseen(bench: Bench, what: str) -> Note | None:
    """A note about what cannot run where JAX sees no GPU."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if jax.default_backend() != "cpu" or bench.quick:
        return None
    return Note(f"{what}: not run: jax sees no GPU; pip install 'jax[cuda12]'")


def leaves(bench: Bench, name: str) -> Iterator[Finding]:
    """A rule's steps of many small leaves, with packed states and without, and optax's."""
    hidden = unseen(bench, f"{name} in JAX")
    if hidden is not None:
        yield hidden
        return
    count = QUICK_LEAVES if bench.quick else LEAVES
    grads = tree(count, ELEMENTS, "gradient")
    contenders = {
        "step": ours(name, grads, tree(count, ELEMENTS, "parameter"), together=TOGETHER),
        "packed": ours(name, grads, tree(count, ELEMENTS, "parameter"), packed=True, together=TOGETHER),
        "optax": theirs(name, grads, tree(count, ELEMENTS, "parameter"), TOGETHER),
    }
    times = interleaved(contenders, QUICK_ROUNDS if bench.quick else ROUNDS)
    each = {what: taken / TOGETHER for what, taken in times.medians().items()}
    for way, words in (("step", AS_FAST), ("packed", PACKED)):
        detail = {**each, "scatter": times.quartiles("optax", way)}
        subject = f"{name}, {count} leaves of {ELEMENTS:,} in JAX"
        yield Row(subject, f"{words} optax.{called(name)}", times.ratio("optax", way), OF_MANY, detail=detail)


def _shape(elements: int) -> tuple[int, int]:
    side = int(elements**0.5)
    return side, elements // side


def _contenders(name: str, elements: int) -> dict[str, Step]:
    import jax
    import jax.numpy as jnp

    shape = (elements,) if name != "lamb" else _shape(elements)
    keys = iter(jax.random.split(jax.random.key(0), 4))

    def array() -> dict[str, Any]:
        return {"w": jax.random.normal(next(keys), shape)}

    grads, source = array(), array()["w"]
    copied = [jnp.zeros_like(source)]
    copying = jax.jit(lambda into, x: jnp.copy(x), donate_argnums=0, keep_unused=True)

    def copy() -> None:
        for _ in range(TOGETHER):
            copied[0] = copying(copied[0], source)
        copied[0].block_until_ready()

    steps = {"step": ours(name, grads, array(), together=TOGETHER), "optax": theirs(name, grads, array(), TOGETHER)}
    return {**steps, "copy": copy}
