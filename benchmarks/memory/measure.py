"""`rulec bench memory`: the allocations of an optimizer's step, and the memory of a training step, by kind."""

from __future__ import annotations

import importlib.util
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.kernels import threads
from benchmarks.memory import jax as memory_jax
from benchmarks.memory import steps as memory_steps
from benchmarks.resident import peak_growth
from benchmarks.result import Result, Row
from rulec.array import Optimizer

SMALL, LARGE = 100_000, 10_000_000
RULE = "adamw"

#: Bytes that a step may allocate for each parameter: none. Counters and interpreter objects are not exactly the same
#: from step to step, so that less than a byte for a thousand parameters counts as none.
PER_PARAMETER = 1e-3

#: Bytes that AdamW may keep for each parameter: two states of float32, and less than a hundredth for tables of chunks,
#: which have a row for each 32,768 parameters.
KEPT = 8.01

ALLOCATED = "bytes a step allocates for each parameter"

#: The lines of progress of the part about a step alone.
_PARTS = 4


def parts(only: Sequence[str] = ()) -> int:
    """The number of calls of `advance` in `measure`."""
    alone = _PARTS if not only or RULE in only else 0
    return alone + memory_steps.parts(only) + memory_jax.parts(only)


def measure(quick: bool, only: Sequence[str] = (), advance: Callable[[], object] = lambda: None) -> Result:
    """The measurement: a step of AdamW alone, in float32, then training steps of several models and rules.

    `only` restricts it to some rules, and `advance` is called after each part.
    """
    notes: list[str] = []
    rows = _alone(LARGE // 10 if quick else LARGE, advance, notes) if not only or RULE in only else []
    rows += memory_steps.measure(quick, only, advance, notes)
    rows += memory_jax.measure(quick, only, advance, notes)
    return Result("memory", rows, quick, threads(), notes)


def _alone(large: int, advance: Callable[[], object], notes: list[str]) -> list[Row]:
    """The rows about a step's allocations beside parameters, gradients and state."""
    rows = [_arrays_step(large)]
    advance()
    rows.append(_arrays_state(large))
    advance()
    rows += _resident(large, notes)
    advance()
    rows += _torch(large, notes)
    advance()
    return rows


def _optimizer(elements: int) -> tuple[Optimizer, list[Any]]:
    param = np.ones(elements, np.float32)
    return Optimizer(RULE, [param]), [np.full(elements, 0.5, np.float32)]


def _growth(cost: Callable[[int], float], large: int) -> tuple[float, dict[str, list[float]]]:
    """Bytes for each further parameter, from a small and a large tensor."""
    small_bytes, large_bytes = cost(SMALL), cost(large)
    detail: dict[str, list[float]] = {"elements": [SMALL, large], "bytes": [small_bytes, large_bytes]}
    return max(0.0, (large_bytes - small_bytes) / (large - SMALL)), detail


def _arrays_step(large: int) -> Row:
    """The peak of Python's and NumPy's allocations in the third step, above their level before it."""

    def cost(elements: int) -> float:
        optimizer, grads = _optimizer(elements)
        for _ in range(2):
            optimizer.step(grads)
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            optimizer.step(grads)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        return float(peak - before)

    value, detail = _growth(cost, large)
    return Row("arrays", ALLOCATED, value, PER_PARAMETER, "at most", "B", detail)


def _arrays_state(large: int) -> Row:
    """The bytes of an optimizer's state: for AdamW two numbers of four bytes for each parameter."""

    def cost(elements: int) -> float:
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            optimizer, grads = _optimizer(elements)
            optimizer.step(grads)
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        return float(held - before - 2 * grads[0].nbytes)

    value, detail = _growth(cost, large)
    return Row("arrays", "bytes of state kept for each parameter", value, KEPT, "at most", "B", detail)


def _resident(large: int, notes: list[str]) -> list[Row]:
    """The growth of the process's peak memory in a step: it includes memory that no allocator counts."""

    def cost(elements: int) -> float:
        optimizer, grads = _optimizer(elements)
        for _ in range(2):
            optimizer.step(grads)
        return float(peak_growth(lambda: optimizer.step(grads)))

    try:
        value, detail = _growth(cost, large)
    except OSError as error:
        notes.append(f"the process's peak memory cannot be read here: {error.strerror}")
        return []
    # The system counts in pages and settles them late: a page for every 16,000 parameters is within that.
    return [Row("arrays", "growth of peak memory in a step, for each parameter", value, 0.25, "at most", "B", detail)]


def _torch(large: int, notes: list[str]) -> list[Row]:
    """The bytes from torch's allocator during a step, by torch's profiler, beside those of torch's optimizers."""
    if importlib.util.find_spec("torch") is None:
        notes.append("rulec.torch is left out: torch is not installed")
        return []
    import torch

    from rulec.torch import AdamW

    makers: dict[str, tuple[Any, float | None]] = {
        "rulec.torch.AdamW": (AdamW, PER_PARAMETER),
        "torch.optim.AdamW(foreach=True)": (lambda p: torch.optim.AdamW(p, foreach=True), None),
    }
    rows = []
    for name, (make, target) in makers.items():
        value, detail = _growth(partial(_torch_bytes, make), large)
        rows.append(Row(name, ALLOCATED, value, target, "at most", "B", detail))
    return rows


def _torch_bytes(make: Callable[[list[Any]], Any], elements: int) -> float:
    """The bytes that torch allocates in the third step."""
    import torch

    tensor = torch.ones(elements, requires_grad=True)
    tensor.grad = torch.full((elements,), 0.5)
    optimizer = make([tensor])
    for _ in range(2):
        optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        optimizer.step()
    sizes = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return float(sum(size for size in sizes if size > 0))
