"""AdamW on one large tensor of 16-bit weights that train as 32 bits do, and with gradients off alignment."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import rulec
from benchmarks.gpu.device import Bench
from benchmarks.gpu.muon import versus
from benchmarks.gpu.part import Part
from benchmarks.gpu.peers import ADAMW, Peer
from benchmarks.gpu.rules import QUICK_ROUNDS, ROUNDS, SHARE, parameter, step_of
from benchmarks.gpu.tensors import FULL, QUICK, copying, make
from benchmarks.gpu.time import timed
from benchmarks.result import Row
from rulec.compiler.layout import layout_for, scheduled, traffic
from rulec.runtime.storage.options import Storage

RULE, DTYPE = "adamw", "bfloat16"

#: The kinds of weights that are measured.
KINDS = ("split", "kahan", "stochastic")

#: The dtypes of gradients that begin one element past an address of 16 bytes.
SHIFTED = ("float32", "bfloat16")

UNALIGNED = "step with a gradient one element off alignment, times that with an aligned one"

#: Another library's step with a compensation for rounding.
KAHAN = Peer("optimi with Kahan's sum", "optimi", "AdamW", {**ADAMW, "eps": 1e-8, "kahan_sum": True})

_TIMING = 3.0


def parts(only: Sequence[str]) -> list[Part]:
    """Each kind of weights, gradients of each dtype, and the other library where it is installed."""
    if only and RULE not in only:
        return []
    peers = [] if KAHAN.missing else [Part(f"{RULE} with kahan weights against {KAHAN.name}", against)]
    return [
        *(Part(f"{RULE} with {kind} weights at 100 Mi", kept, (kind,)) for kind in KINDS),
        *(Part(f"{RULE} with unaligned gradients in {dtype}", unaligned, (dtype,)) for dtype in SHIFTED),
        *peers,
    ]


def kept(bench: Bench, kind: str) -> Iterator[Row]:
    """The step with weights of a kind beside a copy: its share of the bandwidth, by the bytes that it moves."""
    elements = _elements(bench)
    step = step_of(RULE, [parameter(bench, (elements,), DTYPE)], weights=kind)
    contenders = {"step": [step], "copy": [copying(bench, elements)]}
    times = timed(bench.device, contenders, _rounds(bench), _TIMING)
    moved = bytes_moved(kind, elements)
    share = times.ratio("copy", "step") * moved / (8 * elements)
    detail = {**times.detail("copy", "step"), "bytes": moved}
    yield Row(f"{RULE}, {DTYPE} weights, {kind}", SHARE, share, detail=detail)


@functools.cache
def bytes_moved(kind: str, elements: int) -> int:
    """The bytes that a step reads and writes with weights of a kind, their second parts included."""
    rule, storage = rulec.load(RULE), Storage({}, kind)
    program = rulec.compile(rule, memory=storage.memory_of(rule, DTYPE))
    states, _ = storage.of(program, DTYPE, elements)
    return round(sum(traffic(*scheduled(program, layout_for(program, DTYPE, states=states)))) * elements)


def unaligned(bench: Bench, dtype: str) -> Iterator[Row]:
    """The step with a gradient that begins one element into its memory, beside the step with an aligned one."""
    elements = _elements(bench)
    steps = {
        "step": [step_of(RULE, [_shifted(bench, elements, dtype)])],
        "aligned": [step_of(RULE, [parameter(bench, (elements,), dtype)])],
    }
    times = timed(bench.device, steps, _rounds(bench), _TIMING)
    detail = times.detail("step", "aligned")
    yield Row(f"{RULE}, {dtype}", UNALIGNED, times.ratio("step", "aligned"), None, "at most", detail=detail)


def _shifted(bench: Bench, elements: int, dtype: str) -> Any:
    """A parameter whose gradient lies one element after an aligned address."""
    param = make(bench, (elements,), dtype).requires_grad_()
    param.grad = make(bench, (elements + 1,), dtype)[1:]
    return param


def against(bench: Bench) -> Iterator[Row]:
    """Kahan's sum by the other library, over the same parameter and gradient."""
    param = parameter(bench, (_elements(bench),), DTYPE)
    subject = f"{RULE}, {DTYPE} weights, kahan"
    yield versus(bench, subject, KAHAN, RULE, [param], _rounds(bench), target=None, weights="kahan")


def _elements(bench: Bench) -> int:
    return QUICK if bench.quick else FULL


def _rounds(bench: Bench) -> int:
    return QUICK_ROUNDS if bench.quick else ROUNDS
