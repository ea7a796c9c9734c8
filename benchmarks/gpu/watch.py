"""Steps of AdamW that measure statistics, beside the same steps without: one large tensor, and many small ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence

from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Part
from benchmarks.gpu.rules import QUICK_ROUNDS, ROUNDS, step_of
from benchmarks.gpu.tensors import FULL, QUICK, Size, parameters
from benchmarks.gpu.time import Step, host_times, timed
from benchmarks.result import Row
from benchmarks.watch import MANY, MOST, MOST_OF_MANY, SMALL, WITH

RULES = ("adamw", "lamb")

#: The set of statistics that is measured.
WATCHED = "norms"

#: Small tensors of a quick run.
QUICK_MANY = 10

HOST = "host time of a step with the set norms, of the time without"

_TIMING = 3.0


def parts(only: Sequence[str]) -> list[Part]:
    """Each rule on one large tensor; AdamW on many small ones, and on the cupy backend where CuPy is installed."""
    names = [name for name in RULES if not only or name in only]
    of_one = [Part(f"{name} with statistics at 100 Mi", large, (name,)) for name in names]
    if "adamw" not in names:
        return of_one
    backends = ("cupy",) if importlib.util.find_spec("cupy") is not None else ()
    return [
        *of_one,
        Part(f"adamw with statistics of {MANY} tensors", many, ("adamw",)),
        *(Part(f"adamw with statistics at 100 Mi on {name}", large, ("adamw", name)) for name in backends),
    ]


def large(bench: Bench, name: str, backend: str | None = None) -> Iterator[Row]:
    """A rule's step of one vector; on another backend than the device's own without a target."""
    size = Size("", [(QUICK if bench.quick else FULL,)])
    times = timed(bench.device, _contenders(bench, name, size, backend), _rounds(bench), _TIMING)
    subject = ", ".join(filter(None, (f"{name}, {size.elements:,} elements", backend)))
    detail = times.detail("measuring", "plain")
    yield Row(subject, WITH, times.ratio("measuring", "plain"), None if backend else MOST, "at most", detail=detail)


def many(bench: Bench, name: str) -> Iterator[Row]:
    """A rule's step of many small tensors: its time on the device, and on the host."""
    count = QUICK_MANY if bench.quick else MANY
    size = Size(f"{count} tensors of {SMALL}", [(SMALL,)] * count)
    contenders = _contenders(bench, name, size)
    subject = f"{name}, {size.name}"
    times = timed(bench.device, contenders, _rounds(bench), _TIMING)
    detail, ratio = times.detail("measuring", "plain"), times.ratio("measuring", "plain")
    yield Row(subject, WITH, ratio, MOST_OF_MANY, "at most", detail=detail)
    on_host = host_times(bench.device, {way: step for way, (step,) in contenders.items()}, _rounds(bench))
    detail, ratio = on_host.detail("measuring", "plain"), on_host.ratio("measuring", "plain")
    yield Row(subject, HOST, ratio, None, "at most", detail=detail)


def _contenders(bench: Bench, name: str, size: Size, backend: str | None = None) -> dict[str, Sequence[Step]]:
    params = parameters(bench, size)
    ways = {"plain": None, "measuring": WATCHED}
    return {way: [step_of(name, params, backend=backend, watch=watch)] for way, watch in ways.items()}


def _rounds(bench: Bench) -> int:
    return QUICK_ROUNDS if bench.quick else ROUNDS
