"""Rules over the tensors of a Llama's layers, from idle to idle: many matrices, of which the host hands over each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Finding, Part
from benchmarks.gpu.peers import FUSED, Peer
from benchmarks.gpu.rules import QUICK_ROUNDS, step_of
from benchmarks.gpu.tensors import Size, llama_1b, parameters
from benchmarks.gpu.time import Step, idle_times, timed
from benchmarks.result import Row

#: The rules, the one with a target first.
RULES = ("adafactor", "came", "sm3", "adamp", "soap", "apollo", "lamb", "adamw")

#: What each rule runs beside: a fused step of an elementwise rule, and a step of matrices by torch's own operations.
ADAMW = replace(FUSED, name="torch's fused AdamW")
ADAFACTOR = Peer("torch's foreach Adafactor", "torch.optim", "Adafactor", {"foreach": True})

#: Of Adafactor, the wanted speed in times of torch's.
OF_FOREACH = 2.0

IDLE = "step from idle to idle, times as fast as"

ROUNDS, SECONDS = 15, 3.0

#: How much narrower the layers of a quick run are.
_NARROWER = 128


def parts(only: Sequence[str]) -> list[Part]:
    """A part for each rule."""
    names = [name for name in RULES if not only or name in only]
    return [Part(f"{name} on the tensors of Llama 3.2 1B", layers, (name,), 45.0, 6.0) for name in names]


def tensors(bench: Bench) -> Size:
    """The tensors of all layers; of a quick run as many, but small ones."""
    shapes = [tuple(side // (_NARROWER if bench.quick else 1) for side in shape) for shape in llama_1b()]
    return Size(f"{len(shapes)} tensors as of {'a tiny Llama' if bench.quick else 'Llama 3.2 1B'}", shapes)


def layers(bench: Bench, name: str) -> Iterator[Finding]:
    """A rule's step beside torch's two, over the same parameters and gradients.

    The figures are of the host's clock, from idle to idle, for the host may take longer than the device. The device's
    time, held until a step is handed over, is in the detail, and so is the host's.
    """
    size, rounds = tensors(bench), QUICK_ROUNDS if bench.quick else ROUNDS
    params = parameters(bench, size)
    peers = {peer.name: peer for peer in (ADAFACTOR, ADAMW)}
    contenders: dict[str, Step] = {"step": step_of(name, params)}
    contenders |= {way: peer.step(params) for way, peer in peers.items()}
    times = idle_times(bench.device, contenders, rounds, SECONDS)
    held = timed(bench.device, {way: [step] for way, step in contenders.items()}, rounds, SECONDS)
    for way in peers:
        target = OF_FOREACH if name == "adafactor" and way == ADAFACTOR.name else None
        detail = {**times.detail(way, "step"), "device": held.detail(way, "step")}
        yield Row(f"{name}, {size.name}", f"{IDLE} {way}", times.ratio(way, "step"), target, detail=detail)
