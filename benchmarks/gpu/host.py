"""The host's time for a step of a thousand tensors, step by step and in a CUDA graph, and for many groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Finding, Part
from benchmarks.gpu.peers import FUSED
from benchmarks.gpu.tensors import Size, make, parameters
from benchmarks.gpu.time import Step, host_times, timed
from benchmarks.result import Row
from rulec.errors import RulecError

#: Tensors and their elements; other numbers of tensors, which have no target; groups.
COUNT, ELEMENTS, COUNTS, GROUPS = 1000, 1000, (1, 300), 500
QUICK_COUNT = 10
ROUNDS, QUICK_ROUNDS = 60, 3

#: Microseconds that a step of a thousand tensors may take on the host, and a captured one; how far, relative to the
#: largest parameter, a captured step may be from the same step uncaptured.
PER_STEP, CAPTURED, SAME = 200.0, 30.0, 1e-6

#: Learning rates of successive replays, each of them the same number in float32 and float64.
RATES = (2.0**-10, 2.0**-8, 2.0**-12, 0.0, 2.0**-9)

HOST, REPLAYED = "host time of a step", "host time of a captured step"


def parts(only: Sequence[str]) -> list[Part]:
    """The parts, all of them about AdamW."""
    if only and "adamw" not in only:
        return []
    return [
        Part("host time of adamw", host),
        *(Part(f"host time of adamw, {count} tensor{'s' * (count > 1)}", few, (count,)) for count in COUNTS),
        Part("adamw in a graph", captured),
        Part("adamw with many groups", groups),
    ]


def _tensors(bench: Bench, count: int = COUNT) -> Size:
    count = min(QUICK_COUNT, count) if bench.quick else count
    return Size(f"{count} tensor{'s' * (count > 1)} of {ELEMENTS}", [(ELEMENTS,)] * count)


def _rounds(bench: Bench) -> int:
    return QUICK_ROUNDS if bench.quick else ROUNDS


def host(bench: Bench) -> Iterator[Row]:
    """Ours and torch's fused step: with the same gradients and rate in every step, new gradients, and a new rate."""
    size = _tensors(bench)
    for what in ("", "new gradients", "a new rate"):
        ours, theirs = parameters(bench, size), parameters(bench, size)
        optimizer, other = rulec_adamw(ours), FUSED.optimizer(theirs)
        before = {
            "": None,
            "new gradients": _new_gradients(bench, size, [*ours, *theirs]),
            "a new rate": _new_rates([optimizer, other]),
        }[what]
        contenders = {"step": optimizer.step, "torch": other.step}
        times = host_times(bench.device, contenders, _rounds(bench), before=before)
        subject = f"adamw, {size.name}" + (f", {what} each step" if what else "")
        yield Row(subject, HOST, 1e6 * times.median("step"), PER_STEP, "at most", "us", times.medians())


def few(bench: Bench, count: int) -> Iterator[Row]:
    """The host's time for fewer tensors, ours and torch's fused step."""
    size = _tensors(bench, count)
    contenders = {"step": _ours(parameters(bench, size)), "torch": FUSED.step(parameters(bench, size))}
    times = host_times(bench.device, contenders, _rounds(bench))
    yield Row(f"adamw, {size.name}", HOST, 1e6 * times.median("step"), unit="us", detail=times.medians())


def _new_gradients(bench: Bench, size: Size, params: Sequence[Any]) -> Step:
    """A function that moves the gradients of parameters to other addresses, by turns from two sets."""
    sets = [[make(bench, shape) for shape in size.shapes] * (len(params) // len(size.shapes)) for _ in range(2)]
    turns = cycle(sets)

    def change() -> None:
        for param, grad in zip(params, next(turns), strict=True):
            param.grad = grad

    return change


def _new_rates(optimizers: Sequence[Any]) -> Step:
    """A function that sets the next learning rate, as a schedule does."""
    rates = cycle(RATES)

    def change() -> None:
        rate = next(rates)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate

    return change


def rulec_adamw(params: list[Any], **keywords: Any) -> Any:
    """Our AdamW."""
    import rulec.torch

    return rulec.torch.AdamW(params, **keywords)


def _ours(params: list[Any], **keywords: Any) -> Step:
    step: Step = rulec_adamw(params, **keywords).step
    return step


def captured(bench: Bench) -> Iterator[Finding]:
    """A captured step: the time of a replay, and the difference from uncaptured steps at changing learning rates."""
    import torch

    size = _tensors(bench)
    params = parameters(bench, size)
    lr = torch.tensor(RATES[0], device=bench.device.name)
    twins = [p.detach().clone().requires_grad_() for p in params]
    for param, twin in zip(params, twins, strict=True):
        twin.grad = param.grad
    step = _ours(params, lr=lr, capturable=True)
    graph = capture(step)
    _replay_as_twins(graph, lr, params, twins)
    far = _difference(params, twins)
    subject = f"adamw, {size.name}, in a graph"
    yield Row(subject, "largest difference from uncaptured steps", far, SAME, "at most", detail={"rates": RATES})
    yield from _replays(bench, subject, graph, lr, size)


#: Steps before a capture, as torch asks for.
WARM_UP = 3


def capture(step: Step) -> Any:
    """The graph of a step, after a few on a side stream."""
    import torch

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def _replay_as_twins(graph: Any, lr: Any, params: Sequence[Any], twins: list[Any]) -> None:
    """Replays with each rate, and the same steps of the twins, from before the capture on."""
    import rulec.torch

    optimizer = rulec.torch.AdamW(twins, lr=RATES[0])
    for _ in range(WARM_UP):
        optimizer.step()
    for rate in RATES:
        lr.fill_(rate)
        graph.replay()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()


def _difference(params: Sequence[Any], twins: Sequence[Any]) -> float:
    """The largest difference of parameters, relative to the largest number."""
    far = [float((p.detach() - t.detach()).abs().max()) for p, t in zip(params, twins, strict=True)]
    if not all(map(math.isfinite, far)):
        raise RulecError("parameters are infinite or no numbers after steps in a graph")
    return max(far) / max(float(t.detach().abs().max()) for t in twins)


def _replays(bench: Bench, subject: str, graph: Any, lr: Any, size: Size) -> Iterator[Row]:
    """The time of a replay, alone and with a new rate, on host and device, beside torch's captured fused step."""
    rates = cycle(RATES[:3])

    def changing() -> None:
        lr.fill_(next(rates))
        graph.replay()

    theirs = replace(FUSED, keywords={**FUSED.keywords, "capturable": True}).step(parameters(bench, size))
    other = capture(theirs)
    contenders: Mapping[str, Step] = {"step": graph.replay, "with a new rate": changing, "torch": other.replay}
    times = host_times(bench.device, contenders, _rounds(bench))
    yield Row(subject, REPLAYED, 1e6 * times.median("step"), CAPTURED, "at most", "us", times.medians())
    on_device = timed(bench.device, {"step": [graph.replay], "torch": [other.replay]}, _rounds(bench))
    detail = on_device.detail("torch", "step")
    yield Row(subject, "times as fast as torch's captured fused step", on_device.ratio("torch", "step"), detail=detail)


def groups(bench: Bench) -> Iterator[Row]:
    """As many groups as tensors, each with its own rate, against one group of them all: on the device and the host."""
    count = QUICK_COUNT if bench.quick else GROUPS
    size = Size("", [(ELEMENTS,)] * count)
    rates = [1e-5 * 100 ** (i / count) for i in range(count)]
    grouped = [{"params": [p], "lr": lr} for p, lr in zip(parameters(bench, size), rates, strict=True)]
    contenders = {"groups": _ours(grouped), "one": _ours(parameters(bench, size))}
    on_device = timed(bench.device, {name: [step] for name, step in contenders.items()}, _rounds(bench))
    on_host = host_times(bench.device, contenders, _rounds(bench))
    subject = f"{count} groups of one tensor of {ELEMENTS}"
    for where, times in (("device", on_device), ("host", on_host)):
        detail = times.detail("groups", "one")
        yield Row(subject, f"{where} time, times that of one group", times.ratio("groups", "one"), detail=detail)
