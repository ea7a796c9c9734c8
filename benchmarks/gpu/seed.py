"""The comparison that this project began with: Adam as four fused broadcasts, and as plain operators, in CuPy."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Finding, Part
from benchmarks.gpu.rules import AS_FAST, QUICK_ROUNDS, ROUNDS, parameter, step_of
from benchmarks.gpu.tensors import QUICK, copying
from benchmarks.gpu.time import Step, timed
from benchmarks.result import Row

#: 400 MB of float32 parameters.
ELEMENTS = 100_000_000

#: The wanted speed of ours, in times of each.
FUSED, PLAIN = 1.7, 2.2

_LR, _BETA1, _BETA2, _EPS = 1e-3, 0.9, 0.999, 1e-8


def parts(only: Sequence[str]) -> list[Part]:
    """The comparison, unless `only` names other rules."""
    if (only and "adam" not in only) or missing():
        return []
    return [Part("adam against CuPy", against_cupy)]


def missing() -> str | None:
    """A sentence where CuPy is not installed; None where it is."""
    if importlib.util.find_spec("cupy") is not None:
        return None
    return "cupy, to compare its broadcasts with, is not installed"


def against_cupy(bench: Bench) -> Iterator[Finding]:
    """Our step beside CuPy's two ways, over the same parameter and gradient."""
    elements = QUICK if bench.quick else ELEMENTS
    param = parameter(bench, (elements,))
    contenders = {
        "step": [step_of("adam", [param])], "copy": [copying(bench, elements)],
        "fused": [four_broadcasts(param)], "plain": [plain_operators(param)],
    }  # fmt: skip
    times = timed(bench.device, contenders, QUICK_ROUNDS if bench.quick else ROUNDS)
    subject = f"adam, one tensor of {elements:,} elements"
    for way, called, target in (("fused", "four fused broadcasts", FUSED), ("plain", "plain operators", PLAIN)):
        detail = times.detail(way, "step")
        yield Row(subject, f"{AS_FAST} CuPy's {called}", times.ratio(way, "step"), target, detail=detail)


def plain_operators(param: Any) -> Step:
    """Adam as it is written with arrays: every operator is a kernel of its own."""
    import cupy

    p, g = cupy.from_dlpack(param.detach()), cupy.from_dlpack(param.grad)
    m, v = cupy.zeros_like(p), cupy.zeros_like(p)
    t = 0

    def step() -> None:
        nonlocal m, v, p, t
        t += 1
        with _stream():
            m = _BETA1 * m + (1 - _BETA1) * g
            v = _BETA2 * v + (1 - _BETA2) * g**2
            p -= _LR * (m / (1 - _BETA1**t)) / (cupy.sqrt(v / (1 - _BETA2**t)) + _EPS)

    return step


def four_broadcasts(param: Any) -> Step:
    """Adam as four fused broadcasts: each moment, the update and the parameter; twelve accesses for each element."""
    import cupy

    kernel = cupy.ElementwiseKernel
    first = kernel("T g, float32 b", "T m", "m = b * m + (1 - b) * g", "rulec_bench_first")
    second = kernel("T g, float32 b", "T v", "v = b * v + (1 - b) * g * g", "rulec_bench_second")
    update = kernel(
        "T m, T v, float32 c1, float32 c2, float32 lr, float32 eps", "T d",
        "d = m / c1 / (sqrt(v / c2) + eps) * lr", "rulec_bench_update",
    )  # fmt: skip
    subtract = kernel("T d", "T p", "p = p - d", "rulec_bench_subtract")
    p, g = cupy.from_dlpack(param.detach()), cupy.from_dlpack(param.grad)
    m, v, d = (cupy.zeros_like(p) for _ in range(3))
    t = 0

    def step() -> None:
        nonlocal t
        t += 1
        with _stream():
            first(g, _BETA1, m)
            second(g, _BETA2, v)
            update(m, v, 1 - _BETA1**t, 1 - _BETA2**t, _LR, _EPS, d)
            subtract(d, p)

    return step


def _stream() -> Any:
    """torch's current stream as CuPy's."""
    import cupy
    import torch

    return cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
