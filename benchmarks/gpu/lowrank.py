"""Low-rank members of a population against plain inference, on one wide layer; EGGROLL's own code, where installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.es.layers import BASE, DRAWN, UPDATE
from benchmarks.gpu.device import Bench
from benchmarks.gpu.jax import unseen
from benchmarks.gpu.part import Finding, Part
from benchmarks.gpu.rules import QUICK_ROUNDS
from benchmarks.gpu.tensors import make
from benchmarks.gpu.time import Prepared, Step, timed
from benchmarks.result import Row
from rulec.es import Perturbation
from rulec.tools.compare.measure import Times, interleaved

#: The width of the layer, and the members, each with one row of the batch: half as many directions, with two signs.
WIDE, MEMBERS = 4096, 4096
QUICK_WIDE, QUICK_MEMBERS = 64, 32

#: What a forward of all members, and their update, may take of the time of the plain layer's forward.
OF_PLAIN = 1.10

SIGMA, ROUNDS = 0.01, 30

DTYPES = ("bfloat16", "float32")

#: EGGROLL's package, in JAX.
EGGROLL = "hyperscalees"


def parts(only: Sequence[str]) -> list[Part]:
    """The layer in each dtype, ours and EGGROLL's; none where `only` names rules."""
    if only:
        return []
    theirs = [] if missing(only) else [Part(f"EGGROLL's members in {dtype}", eggroll, (dtype,)) for dtype in DTYPES]
    return [*(Part(f"low-rank members in {dtype}", members, (dtype,)) for dtype in DTYPES), *theirs]


def missing(only: Sequence[str]) -> list[str]:
    """A note where EGGROLL's own code or JAX is not installed."""
    there = all(importlib.util.find_spec(package) for package in (EGGROLL, "jax"))
    return [] if there or only else [f"{EGGROLL}, EGGROLL's own code in JAX, to compare with, is not installed"]


def _size(bench: Bench) -> tuple[int, int]:
    return (QUICK_WIDE, QUICK_MEMBERS) if bench.quick else (WIDE, MEMBERS)


def _named(bench: Bench, dtype: str) -> str:
    wide, count = _size(bench)
    return f"lowrank, rank 1, linear {wide} x {wide}, {count} members, {dtype}"


def members(bench: Bench, dtype: str) -> Iterator[Finding]:
    """A forward with noise of before, one with noise drawn anew, and the update, over the plain layer's forward."""
    contenders = {name: [step] for name, step in _ours(bench, dtype).items()}
    times = timed(bench.device, contenders, QUICK_ROUNDS if bench.quick else ROUNDS, 6.0)
    measures = {"forward": (BASE, OF_PLAIN), "drawn": (DRAWN, None), "update": (UPDATE, OF_PLAIN)}
    yield from _over_plain(_named(bench, dtype), times, measures)


def _over_plain(subject: str, times: Times, measures: Mapping[str, tuple[str, float | None]]) -> Iterator[Row]:
    for name, (measure, target) in measures.items():
        detail = times.detail(name, "base")
        yield Row(subject, measure, times.ratio(name, "base"), target, "at most", detail=detail)


def _ours(bench: Bench, dtype: str) -> dict[str, Step]:
    import torch

    import rulec.torch

    wide, count = _size(bench)
    layer = torch.nn.Linear(wide, wide, bias=False, device=bench.device.name, dtype=getattr(torch, dtype))
    model, batch = torch.nn.Sequential(layer), make(bench, (count, wide), dtype)
    es = rulec.torch.perturb(model, Perturbation("lowrank", directions=count // 2, sigma=SIGMA, seed=0))
    fitness = np.random.default_rng(0).normal(size=count)

    def forward() -> None:
        es(batch)

    def update() -> None:
        es.update(fitness)

    def plain() -> None:
        with torch.no_grad():
            model(batch)

    return {
        "base": plain, "forward": Prepared(forward, forward), "drawn": Prepared(forward, es.free_memory),
        "update": Prepared(update, forward),
    }  # fmt: skip


def eggroll(bench: Bench, dtype: str) -> Iterator[Finding]:
    """EGGROLL's forward, which draws its noise, and its update, over the plain layer's forward in JAX."""
    hidden = unseen(bench, f"EGGROLL's members in {dtype}")
    if hidden is not None:
        yield hidden
        return
    times = interleaved(_theirs(bench, dtype), QUICK_ROUNDS if bench.quick else ROUNDS)
    subject = f"EGGROLL's own code in JAX: {_named(bench, dtype)}"
    yield from _over_plain(subject, times, {"drawn": (DRAWN, None), "update": (UPDATE, None)})


def _theirs(bench: Bench, dtype: str) -> dict[str, Step]:
    import jax
    import jax.numpy as jnp

    strategy = importlib.import_module(f"{EGGROLL}.noiser.eggroll").EggRoll
    wide, count = _size(bench)
    keys = jax.random.split(jax.random.key(0), 4)
    weight, batch = (jax.random.normal(k, (n, wide), dtype) for k, n in zip(keys, (wide, count), strict=False))
    frozen, noiser = strategy.init_noiser(weight, SIGMA, 1e-3, rank=1)
    ids, fitness = jnp.arange(count), jax.random.normal(keys[2], (count,), dtype)

    def forward(weight: Any, batch: Any) -> Any:
        return jax.vmap(lambda i, row: strategy.do_mm(frozen, noiser, weight, keys[3], (0, i), row))(ids, batch)

    def update(weight: Any, fitness: Any) -> Any:
        epochs = jnp.zeros_like(ids)
        return strategy.do_updates(frozen, dict(noiser), weight, keys[3], fitness, (epochs, ids), 1)[1]

    plain, drawn, updated = jax.jit(lambda weight, batch: batch @ weight.T), jax.jit(forward), jax.jit(update)
    return {
        "base": lambda: plain(weight, batch).block_until_ready(),
        "drawn": lambda: drawn(weight, batch).block_until_ready(),
        "update": lambda: updated(weight, fitness).block_until_ready(),
    }
