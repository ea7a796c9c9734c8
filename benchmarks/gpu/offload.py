"""Training steps of a Llama of a billion weights whose states and steps are on the host, inside the backward pass.

A step can take no less time than its forward and backward pass, than its bytes over the link, and than the host's step.
The time of a step is held against the longest of the three, and the peak of memory against `rulec memory`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from benchmarks.gpu import llama
from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Finding, Part
from benchmarks.gpu.time import Step, timed
from benchmarks.offload import HostStep
from benchmarks.result import Row

#: The rules, and the bytes of a weight and of a gradient, each of which travels once in a step.
RULES, EACH = ("adamw", "lion"), 2

#: The targets: the time of a step, times the longest of what it needs; how far the peak may be from what is said.
OF_LONGEST, AWAY = 1.15, llama.AWAY

TIME = "time of a step, times the longest of its passes, its bytes over the link and the host's step"

#: Bytes of a copy over the link, and how many of each direction are on their way together.
COPY, COPIES = 64 << 20, 8

ROUNDS = 5


def parts(only: Sequence[str]) -> list[Part]:
    """Each rule."""
    rules = [rule for rule in RULES if not only or rule in only]
    return [Part(f"a Llama by {rule}, on the host", steps, (rule,), 120.0, 30.0) for rule in rules]


def steps(bench: Bench, rule: str) -> Iterator[Finding]:
    """The peak of memory of steps on the host, then their time beside what they need."""
    peak, account = llama.peak_of(bench, partial(taken, bench, rule)), said(bench, rule)
    subject = f"{rule} in {llama.DTYPE}, {llama._model(bench)}: on the host"
    detail: dict[str, Any] = {"peak": peak, "said": account}
    yield Row(subject, llama.SAID, abs(peak / account["peak"] - 1), AWAY, "at most", detail=detail)
    model = taken(bench, rule)
    times = timed(bench.device, {"step": [model.step], "passes": [passes(bench, model.model)]}, llama.ROUNDS, 20.0)
    needs = {"passes": times.median("passes"), **needed(bench, rule, model.model)}
    step = times.median("step")
    yield Row(
        subject, TIME, step / max(needs.values()), OF_LONGEST, "at most", detail={"step": step, **needs}
    )  # fmt: skip


def _training(bench: Bench, rule: str, batch: Any) -> Any:
    training = replace(llama._training(bench, "adamw", batch), rule=rule, hyper={"lr": 1e-5})
    return replace(training, offload="step")


def taken(bench: Bench, rule: str) -> llama.Taken:
    """A model on the device, and its steps on the host."""
    import torch

    from rulec.torch.memory_profile.meter import stepping

    ids = _ids(bench)
    training = _training(bench, rule, lambda dtype: (ids,))
    model = training.model(dtype=torch.bfloat16, device=bench.device.name)
    return llama.Taken(model, stepping(model, training, "eager")[1])


def said(bench: Bench, rule: str) -> dict[str, Any]:
    """The account of `rulec memory --offload step` for the same training."""
    from rulec.torch.memory_profile.meter import account, tokens

    return account(_training(bench, rule, tokens(1, _length(bench))), "eager", before=1).data()


def passes(bench: Bench, model: Any) -> Step:
    """The forward and the backward pass alone; every gradient is dropped as it comes."""
    import torch

    twin = type(model)(model.shape, model.recompute, dtype=torch.bfloat16, device=bench.device.name)
    for param in twin.parameters():
        param.register_post_accumulate_grad_hook(_drop)
    ids = _ids(bench)
    return lambda: twin(ids).backward()


def _drop(param: Any) -> None:
    param.grad = None


def needed(bench: Bench, rule: str, model: Any) -> dict[str, float]:
    """The seconds of the bytes of a step over the link, and of the step on the host."""
    shapes = [tuple(p.shape) for p in model.parameters()]
    count = sum(p.numel() for p in model.parameters())
    host = HostStep(rule, shapes)
    return {"link": EACH * count * link_seconds(bench), "host": _median(bench, host.step)}


def link_seconds(bench: Bench) -> float:
    """The seconds of a byte over the link, while as many come down as go up."""
    import torch

    from rulec.torch.offload.link import link_of

    link, size = link_of(torch.device(bench.device.name)), 1 << 12 if bench.quick else COPY
    host = [link.host_memory(size) for _ in range(2 * COPIES)]
    there = [link.device_memory(size) for _ in range(2 * COPIES)]

    def copy() -> None:
        pairs = list(zip(host, there, strict=True))
        events = [event for k in range(COPIES) for event in (link.down([pairs[k]]), link.up([pairs[COPIES + k][::-1]]))]
        for event in events:
            event.wait()

    return _median(bench, copy) / (COPIES * size)


def _median(bench: Bench, run: Callable[[], object]) -> float:
    """The median time of a run by the host's clock."""
    run()
    seconds = []
    for _ in range(ROUNDS):
        bench.device.synchronize()
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return median(seconds)


def _length(bench: Bench) -> int:
    return llama.QUICK_TOKENS if bench.quick else llama.TOKENS


def _ids(bench: Bench) -> Any:
    import torch

    return torch.randint(0, 64, (1, _length(bench)), device=bench.device.name)
