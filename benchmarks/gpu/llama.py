"""Training steps of a Llama of a billion weights, with updates after the backward pass and inside it.

The peak of memory is held against `rulec memory`, and the time of a step against the deferred one, by turns. torch's
fused AdamW runs beside both, in a step and in hooks with an optimizer for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.gpu.device import Bench
from benchmarks.gpu.eager import memory_now, memory_peak, memory_reset
from benchmarks.gpu.part import Finding, Part
from benchmarks.gpu.rules import QUICK_ROUNDS
from benchmarks.gpu.time import Step, timed
from benchmarks.result import Row
from rulec.memory.shape import Shape

if TYPE_CHECKING:
    from rulec.torch.memory_profile.meter import Training

#: The shape of TinyLlama, and one of no size.
LLAMA = Shape("llama", 32_000, 2048, 5632, 22, 32, 4, 64, 2048, tied=False)
QUICK = replace(LLAMA, vocabulary=64, width=32, inner=64, layers=2, heads=4, groups=2, head=8)

#: Tokens of the one sequence of a step: few, as where a model is tuned, so that the update counts.
TOKENS, QUICK_TOKENS = 2048, 16

#: Rule -> its hyper-parameters; Apollo's rank is an eighth of the width.
RULES: Mapping[str, Mapping[str, Any]] = {"adamw": {"lr": 1e-5, "weight_decay": 0.01}, "apollo": {"lr": 1e-5}}

DTYPE = "bfloat16"

DEFERRED, EAGER, EPILOGUE = "deferred", "eager", "epilogue"
FUSED, HOOKS = "torch's fused AdamW", "torch's fused AdamW in hooks"

#: The targets: how far the peak may be from what is said; the time of a step, times that of the deferred one.
AWAY, SLOWER = 0.03, {EAGER: 1.02, EPILOGUE: 1.0}

SAID = "peak of memory, away from what rulec memory says"
PEAK, TIME = "peak of memory, times that of", "time of a step, times that of"

ROUNDS, SECONDS = 12, 6.0


class Taken(NamedTuple):
    """A model, and a function that takes one training step of it."""

    model: Any
    step: Step


def parts(only: Sequence[str]) -> list[Part]:
    """Each rule in each way; torch's hooks where AdamW is measured."""
    rules = [rule for rule in RULES if not only or rule in only]
    ours = [Part(f"a Llama by {rule}, {way}", steps, (rule, way)) for rule in rules for way in (DEFERRED, *SLOWER)]
    return [*ours, *([Part("a Llama by torch in hooks", hooked)] if "adamw" in rules else [])]


def steps(bench: Bench, rule: str, way: str) -> Iterator[Finding]:
    """Our steps in one way: their peak of memory, then their time beside the deferred ones and torch's."""
    peaks = {name: peak_of(bench, make) for name, make in _makers(bench, rule, (way, FUSED)).items()}
    account = said(bench, rule, way)
    subject, detail = f"{rule} in {DTYPE}, {_model(bench)}: {way}", {"peak": peaks[way], "said": account}
    yield Row(subject, SAID, abs(peaks[way] / account["peak"] - 1), AWAY, "at most", detail=detail)
    least = None if way == DEFERRED else 1.0
    yield Row(subject, f"{PEAK} {FUSED}", peaks[way] / peaks[FUSED], least, "at most", detail=peaks)
    yield from _timed(bench, subject, way, _makers(bench, rule, dict.fromkeys((way, DEFERRED, FUSED))))


def hooked(bench: Bench) -> Iterator[Finding]:
    """torch's own optimizers in hooks, one for each parameter, beside its fused step."""
    makers = _makers(bench, "adamw", (HOOKS, FUSED))
    peaks = {name: peak_of(bench, make) for name, make in makers.items()}
    subject = f"adamw in {DTYPE}, {_model(bench)}: {HOOKS}"
    yield Row(subject, f"{PEAK} {FUSED}", peaks[HOOKS] / peaks[FUSED], None, "at most", detail=peaks)
    yield from _timed(bench, subject, HOOKS, makers)


def _timed(bench: Bench, subject: str, way: str, makers: Mapping[str, Callable[[], Taken]]) -> Iterator[Row]:
    """The time of a way over that of each other one; all models are there at once."""
    contenders = {name: [make().step] for name, make in makers.items()}
    times = timed(bench.device, contenders, QUICK_ROUNDS if bench.quick else ROUNDS, SECONDS)
    for other in makers:
        if other != way:
            target = SLOWER.get(way) if other == DEFERRED else None
            detail = times.detail(way, other)
            yield Row(subject, f"{TIME} {other}", times.ratio(way, other), target, "at most", detail=detail)


def peak_of(bench: Bench, make: Callable[[], Taken]) -> int:
    """The bytes of one model alone at the peak of a step, after a few steps for states and kernels."""
    before = memory_now(bench)
    taken = make()
    for _ in range(3):
        taken.step()
    memory_reset(bench)
    taken.step()
    bench.device.synchronize()
    peak = memory_peak(bench) - before
    del taken
    bench.device.release()
    return peak


def said(bench: Bench, rule: str, way: Any) -> dict[str, Any]:
    """The account of `rulec memory` for the same training, on tensors without memory."""
    from rulec.torch.memory_profile.meter import account, tokens

    length = QUICK_TOKENS if bench.quick else TOKENS
    return account(_training(bench, rule, tokens(1, length)), way, before=1).data()


def _training(bench: Bench, rule: str, batch: Any) -> Training:
    from rulec.torch.memory_profile.meter import Training
    from rulec.torch.memory_profile.models import Transformer

    shape = QUICK if bench.quick else LLAMA
    rank = {"rank": shape.width // 8} if rule == "apollo" else {}
    return Training(partial(Transformer, shape, False), batch, rule, {**RULES[rule], **rank}, DTYPE)


def _model(bench: Bench) -> str:
    return f"a tiny Llama, {QUICK_TOKENS} tokens" if bench.quick else f"a Llama of 1.1 billion, {TOKENS} tokens"


def _makers(bench: Bench, rule: str, ways: Any) -> dict[str, Callable[[], Taken]]:
    return {way: partial(_taken, bench, rule, way) for way in ways}


def _taken(bench: Bench, rule: str, way: Any) -> Taken:
    """A model on the device, and its steps in one way."""
    import torch

    from rulec.torch.memory_profile.meter import stepping

    length = QUICK_TOKENS if bench.quick else TOKENS
    ids = torch.randint(0, 64, (1, length), device=bench.device.name)
    training = _training(bench, rule, lambda dtype: (ids,))
    model = training.model(dtype=torch.bfloat16, device=bench.device.name)
    if way == FUSED:
        return Taken(model, _fused(model, ids))
    if way == HOOKS:
        return Taken(model, _in_hooks(model, ids))
    return Taken(model, stepping(model, training, way)[1])


def _fused(model: Any, ids: Any) -> Step:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **RULES["adamw"])

    def step() -> None:
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _in_hooks(model: Any, ids: Any) -> Step:
    """Each parameter is updated by an optimizer of its own as soon as its gradient is there, which is then freed."""
    import torch

    for param in model.parameters():
        optimizer = torch.optim.AdamW([param], fused=True, **RULES["adamw"])

        def update(_: Any, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(update)
    return lambda: model(ids).backward()
