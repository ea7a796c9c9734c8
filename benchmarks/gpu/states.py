"""AdamW with states in codes on one large tensor, beside states in float32, a copy, and other libraries' codes."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Sequence

import rulec
from benchmarks.gpu.device import Bench
from benchmarks.gpu.muon import versus
from benchmarks.gpu.part import Part
from benchmarks.gpu.peers import ADAMW, Peer
from benchmarks.gpu.rules import QUICK_ROUNDS, ROUNDS, SHARE, parameter, step_of
from benchmarks.gpu.tensors import FULL, QUICK, copying
from benchmarks.gpu.time import timed
from benchmarks.result import Row
from rulec.compiler.layout import layout_for, scheduled, traffic
from rulec.formats import NAMES
from rulec.runtime.storage.options import Storage

RULE = "adamw"

#: The words of the rows beside `SHARE`.
TIMES = "step, times that with states in float32"

#: The formats with targets or peers, which are measured first; of a format, the most that a step may take in times of
#: the step with states in float32.
FIRST, MOST = ("dynamic8", "int8", "float8_e4m3"), {"dynamic8": 1.0}

#: AdamW with states in the codes of `dynamic8`, by other libraries; the last one compiles its step.
PEERS = (
    Peer("bitsandbytes' AdamW8bit", "bitsandbytes.optim", "AdamW8bit", ADAMW, target=1.5),
    Peer("torchao's AdamW8bit", "torchao.optim", "AdamW8bit", ADAMW),
)

#: The formats that are also measured on the cupy backend.
OTHERWISE = ("int8", "dynamic8")

_TIMING = 3.0


def parts(only: Sequence[str]) -> list[Part]:
    """Each format, those of `FIRST` first; other libraries; and a few formats on the cupy backend."""
    if only and RULE not in only:
        return []
    others = OTHERWISE if importlib.util.find_spec("cupy") is not None else ()
    names = [*FIRST, *(name for name in NAMES if name not in FIRST)]
    return [
        *(Part(f"{RULE} in {name} at 100 Mi", coded, (name,)) for name in names),
        *(
            Part(f"{RULE} in dynamic8 at 100 Mi against {p.name}", against, (p.name,), 60.0, 20.0 if p.slow else 5.0)
            for p in PEERS
            if not p.missing
        ),
        *(Part(f"{RULE} in {name} at 100 Mi on cupy", coded, (name, "cupy")) for name in others),
    ]


def missing(only: Sequence[str]) -> list[str]:
    """A note for each library that is not installed."""
    return [peer.missing for peer in PEERS if peer.missing] if not only or RULE in only else []


def coded(bench: Bench, name: str, backend: str | None = None) -> Iterator[Row]:
    """The step with all states in a format."""
    elements = QUICK if bench.quick else FULL
    steps = {
        word: [step_of(RULE, [parameter(bench, (elements,))], backend=backend, state_dtype=word)]
        for word in ("float32", name)
    }
    contenders = {**steps, "copy": [copying(bench, elements)]}
    times = timed(bench.device, contenders, QUICK_ROUNDS if bench.quick else ROUNDS, _TIMING)
    subject = ", ".join(filter(None, (RULE, f"states in {name}", backend)))
    moved = bytes_moved(name, elements)
    detail = {**times.detail(name, "float32"), "bytes": moved}
    most = None if backend else MOST.get(name)
    yield Row(subject, TIMES, times.ratio(name, "float32"), most, "at most", detail=detail)
    yield Row(subject, SHARE, times.ratio("copy", name) * moved / (8 * elements), None, detail=detail)


def against(bench: Bench, name: str) -> Iterator[Row]:
    """The step with states in `dynamic8` beside a library's, over the same parameter and gradient."""
    (peer,) = (peer for peer in PEERS if peer.name == name)
    param = parameter(bench, (QUICK if bench.quick else FULL,))
    rounds, subject = QUICK_ROUNDS if bench.quick else ROUNDS, f"{RULE}, states in dynamic8"
    yield versus(bench, subject, peer, RULE, [param], rounds, target=peer.target, state_dtype="dynamic8")


@functools.cache
def bytes_moved(name: str, elements: int) -> int:
    """The bytes that a step reads and writes with states in a format, their scales included."""
    program = rulec.compile(rulec.load(RULE))
    states, formats = Storage({"": name}).of(program, "float32", elements)
    kernel = scheduled(program, layout_for(program, "float32", states=states, formats=formats))
    return round(sum(traffic(*kernel)) * elements)
