"""AdamW with states in codes on one large tensor: its step beside that with states in float32, and beside a copy."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Sequence

import rulec
from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Part
from benchmarks.gpu.rules import QUICK_ROUNDS, ROUNDS, SHARE, parameter, step_of
from benchmarks.gpu.tensors import FULL, QUICK, copying
from benchmarks.gpu.time import timed
from benchmarks.result import Row
from rulec.compiler.layout import layout_for, scheduled, traffic
from rulec.formats import NAMES
from rulec.runtime.storage import Storage

RULE = "adamw"

#: The words of the rows beside `SHARE`.
TIMES = "step, times that with states in float32"

#: The formats that are also measured on the cupy backend.
OTHERWISE = ("int8", "dynamic8")

_TIMING = 3.0


def parts(only: Sequence[str]) -> list[Part]:
    """Each format, and a few of them on the cupy backend."""
    if only and RULE not in only:
        return []
    others = OTHERWISE if importlib.util.find_spec("cupy") is not None else ()
    return [
        *(Part(f"{RULE} in {name} at 100 Mi", coded, (name,)) for name in NAMES),
        *(Part(f"{RULE} in {name} at 100 Mi on cupy", coded, (name, "cupy")) for name in others),
    ]


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
    detail = {**times.medians(), "bytes": moved, "scatter": times.quartiles(name, "float32")}
    yield Row(subject, TIMES, times.ratio(name, "float32"), None, "at most", detail=detail)
    yield Row(subject, SHARE, times.ratio("copy", name) * moved / (8 * elements), None, detail=detail)


@functools.cache
def bytes_moved(name: str, elements: int) -> int:
    """The bytes that a step reads and writes with states in a format, their scales included."""
    program = rulec.compile(rulec.load(RULE))
    states, formats = Storage({"": name}).of(program, "float32", elements)
    kernel = scheduled(program, layout_for(program, "float32", states=states, formats=formats))
    return round(sum(traffic(*kernel)) * elements)
