"""`rulec bench many`: many tensors at once, where the work around a kernel matters as much as the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import rulec
from benchmarks.around import time_around
from benchmarks.kernels import Pair, bound, pair, threads
from benchmarks.result import Result, Row
from benchmarks.tensors import have_torch, tensors
from rulec.compiler.layout import layout_for
from rulec.tools.compare.measure import interleaved

#: (tensors, elements of each, how many times faster than torch's fused AdamW a step should be, microseconds that a step
#: may add to its kernel).
SIZES = ((1000, 1000, 10.0, 100.0), (300, 10_000, 4.0, 40.0), (148, 84_000, 1.3, 30.0), (1, 1000, 1.0, 30.0))
ROUNDS, QUICK_ROUNDS = 41, 5

#: Of the limit's speed; how much more 500 groups may cost than one.
OF_LIMIT, GROUPS_COST = 0.9, 1.2
GROUPS, GROUP_ELEMENTS = 500, 1000

#: What is measured, one line of progress for each.
PARTS = len(SIZES) + 1


def measure(quick: bool, advance: Callable[[], object] = lambda: None) -> Result:
    """The measurement, with AdamW in float32; `advance` is called after every size."""
    notes: list[str] = []
    rounds = QUICK_ROUNDS if quick else ROUNDS
    program = rulec.compile(rulec.load("adamw"))
    kernels = pair(program, layout_for(program, "float32"))
    with_torch = have_torch(notes)
    rows: list[Row] = []
    for size in SIZES:
        rows += _size(kernels, *size, rounds, with_torch)
        advance()
    if with_torch:
        rows.append(_groups(rounds))
    advance()
    return Result("many", rows, quick, threads(), notes)


def _size(
    kernels: Pair, count: int, elements: int, target: float, most: float, rounds: int, with_torch: bool
) -> Iterator[Row]:  # fmt: skip
    label = f"{count} tensors of {elements:,}"
    arrays, rows = _arrays(kernels, count, elements), kernels.rows(count, (elements,))
    contenders = {"kernel": bound(kernels.kernel, *arrays, rows), "limit": bound(kernels.limit, *arrays, rows)}
    if with_torch:
        contenders |= {"step": _our_step(count, elements), "torch": _torchs(count, elements).step}
        contenders |= {
            "scheduled": _scheduled(_ours(count, elements)),
            "torch scheduled": _scheduled(_torchs(count, elements)),
        }
    times = interleaved(contenders, rounds, settled=True)
    seconds = times.medians()
    detail = {**seconds, "scatter": times.quartiles("limit", "kernel")}
    yield Row(label, "kernel, of the limit's speed", times.ratio("limit", "kernel"), OF_LIMIT, detail=detail)
    if with_torch:
        detail = {**seconds, "scatter": times.quartiles("torch", "step")}
        measure = "step, times as fast as torch's fused step"
        yield Row(label, measure, times.ratio("torch", "step"), target, detail=detail)
        detail = {**seconds, "scatter": times.quartiles("torch scheduled", "scheduled")}
        yield Row(
            label, f"{measure}, with a schedule", times.ratio("torch scheduled", "scheduled"), None, detail=detail
        )
        kind = type(kernels.kernel.bind(*arrays[::2]))
        added = time_around(lambda: _our_step(count, elements), kind, 5 * rounds)
        detail = {"seconds": added, "per_tensor": added / count}
        yield Row(label, "step, added to the kernel", added * 1e6, most, "at most", "us", detail)


def _arrays(kernels: Pair, count: int, elements: int) -> tuple[list[Any], list[Any], list[dict[str, Any]]]:
    """Parameters, gradients and states, each an array of its own."""
    rng = np.random.default_rng(0)

    def signed() -> Any:
        return rng.normal(size=elements).astype(np.float32)

    def positive() -> Any:
        return rng.uniform(0.01, 1.0, size=elements).astype(np.float32)

    states = [{name: positive() for name in kernels.state_names} for _ in range(count)]
    return [signed() for _ in range(count)], [signed() for _ in range(count)], states


def _ours(count: int, elements: int) -> Any:
    import rulec.torch

    return rulec.torch.AdamW(tensors(count, elements))


def _torchs(count: int, elements: int) -> Any:
    import torch

    return torch.optim.AdamW(tensors(count, elements), fused=True)


def _our_step(count: int, elements: int) -> Callable[[], object]:
    step: Callable[[], object] = _ours(count, elements).step
    return step


def _scheduled(optimizer: Any) -> Callable[[], object]:
    """Steps with another learning rate each, as a schedule gives them."""
    group = optimizer.param_groups[0]

    def step() -> None:
        group["lr"] *= 1.0001
        optimizer.step()

    return step


def _groups(rounds: int) -> Row:
    """As many groups as tensors, each with its own learning rate, against one group of them all."""
    import rulec.torch

    rates = np.geomspace(1e-5, 1e-3, GROUPS).tolist()
    groups = [{"params": [t], "lr": lr} for t, lr in zip(tensors(GROUPS, GROUP_ELEMENTS), rates, strict=True)]
    contenders: dict[str, Callable[[], object]] = {
        "groups": rulec.torch.AdamW(groups).step,
        "one": rulec.torch.AdamW(tensors(GROUPS, GROUP_ELEMENTS)).step,
    }
    times = interleaved(contenders, rounds, settled=True)
    detail = times.medians() | {"scatter": times.quartiles("groups", "one")}
    subject, measure = f"{GROUPS} groups of one tensor of {GROUP_ELEMENTS:,}", "step, times the cost of one group"
    return Row(subject, measure, times.ratio("groups", "one"), GROUPS_COST, "at most", detail=detail)
