"""Every rule on one large tensor, as a share of the copy bandwidth, measured by turns with it."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import rulec
from benchmarks import reductions, rules
from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Finding, Note, Part, sentence
from benchmarks.gpu.peers import TorchStep, torch_steps
from benchmarks.gpu.tensors import FULL, QUICK, Shape, copying, make
from benchmarks.gpu.time import Step, timed
from benchmarks.reductions import rule_of
from benchmarks.result import Row
from rulec.compiler.layout import kernel_for, traffic
from rulec.compiler.view import matrix_view
from rulec.testing.kinds import EPS
from rulec.tools.compare.measure import Times

ROUNDS, QUICK_ROUNDS = 30, 3

#: The targets: of the copy bandwidth, and times as fast as foreach where torch has no fused kernel on the device.
OF_COPY, OF_FOREACH = 0.95, 3.0

#: Rules with values for rows, columns or matrices whose stages have a target, and what it is, of the copy bandwidth.
LINES, OF_LINES = ("adafactor", "came", "sm3", "adamp", "adam_mini"), 0.9

#: Rules that are also measured with all arrays in bfloat16, and on another backend than the device's own.
OTHERWISE = ("adamw", "sgd", "lion")

#: What the rows say.
COPY = "bandwidth of a copy, read and written"
SHARE = "step, of the copy bandwidth"
STAGES = "step, of the copy bandwidth for what its stages move"
AS_FAST = "step, times as fast as"

#: The seconds that are taken to time one rule, beside compiling it.
_TIMING = 4.0


def elementwise(only: Sequence[str]) -> list[str]:
    """The elementwise rules."""
    return rules.plan(only)


def reducing(only: Sequence[str]) -> list[str]:
    """The rules with reductions and no matrix functions."""
    return reductions.plan(only)


def warm_parts(only: Sequence[str]) -> list[Part]:
    """One small step of each timed elementwise rule: many processes compile the kernels at once."""
    return [Part(f"compiling {name}", warm, (name,)) for name in elementwise(only)]


def reducing_warm_parts(only: Sequence[str]) -> list[Part]:
    """The same of each rule with reductions."""
    return [Part(f"compiling {name}", warm, (name,)) for name in reducing(only)]


def parts(only: Sequence[str]) -> list[Part]:
    """The copy alone, and each rule."""
    names = elementwise(only)
    first = [name for name in ("adamw", "sgd", "lion") if name in names]
    ordered = [*first, *(name for name in names if name not in first)]
    return [copy_part(), *(Part(f"{n} at 100 Mi", rule, (n, True)) for n in ordered)]


def copy_part() -> Part:
    """The copy alone."""
    return Part("copy bandwidth", copy_bandwidth)


def reducing_parts(only: Sequence[str]) -> list[Part]:
    """Each rule with reductions, those with targets first."""
    ordered = sorted(reducing(only), key=lambda name: name not in LINES)
    return [Part(f"{name} at 100 Mi", rule, (name, False)) for name in ordered]


def other_parts(only: Sequence[str]) -> list[Part]:
    """A few rules with all arrays in 16 bits, and on the cupy backend."""
    names = [name for name in OTHERWISE if name in elementwise(only)]
    extra = [Part(f"{name} at 100 Mi in bfloat16", rule, (name, True, "bfloat16")) for name in names]
    if importlib.util.find_spec("cupy") is not None:
        extra += [Part(f"{name} at 100 Mi on cupy", rule, (name, True, "float32", "cupy")) for name in names]
    return extra


def copy_bandwidth(bench: Bench) -> Iterator[Row]:
    """The bytes that a copy of 100 Mi float32 numbers reads and writes in a second."""
    elements = QUICK if bench.quick else FULL
    times = timed(bench.device, {"copy": [copying(bench, elements)]}, QUICK_ROUNDS if bench.quick else ROUNDS)
    seconds = times.median("copy")
    yield Row(f"{elements:,} float32", COPY, 8e-9 * elements / seconds, unit="GB/s", detail={"copy": seconds})


def warm(bench: Bench, name: str) -> Iterator[Finding]:
    """One step, for its compilation."""
    param = parameter(bench, (256, 256))
    step_of(name, [param])()
    bench.device.synchronize()
    yield from ()


def rule(
    bench: Bench, name: str, flat: bool, dtype: str = "float32", backend: str | None = None
) -> Iterator[Finding]:  # fmt: skip
    """A rule's step beside a copy and torch's own steps, on a vector where `flat`, else on a matrix.

    Only float32 on the device's own backend has a target.
    """
    elements = QUICK if bench.quick else FULL
    side = int(elements**0.5)
    shape: Shape = (elements,) if flat else (side, elements // side)
    param = parameter(bench, shape, dtype)
    step = step_of(name, [param], backend=backend)
    contenders: dict[str, Sequence[Step]] = {"step": [step], "copy": [copying(bench, elements)]}
    subject, judged = ", ".join(filter(None, (name, dtype, backend))), dtype == "float32" and backend is None
    theirs = {}
    for one in torch_steps(name):
        torch_step = _usable(one, param)
        if isinstance(torch_step, str):
            yield Note(f"{name} in {dtype}: {one.name} does not run here: {torch_step}")
        else:
            theirs[one.way], contenders[one.way] = one, [torch_step]
    times = timed(bench.device, contenders, QUICK_ROUNDS if bench.quick else ROUNDS, _TIMING)
    wanted = OF_COPY if flat else OF_LINES if name in LINES else None
    yield _share(subject, times, bytes_moved(name, shape, dtype), 8 * elements, flat, wanted if judged else None)
    for way, one in theirs.items():
        target = OF_FOREACH if judged and way == "foreach" and "fused" not in theirs else None
        detail = times.detail(way, "step")
        yield Row(subject, f"{AS_FAST} {one.name}", times.ratio(way, "step"), target, detail=detail)


def _share(subject: str, times: Times, moved: int, copied: int, flat: bool, target: float | None) -> Row:
    detail = {
        **times.detail("copy", "step"), "bytes": moved, "bytes_per_second": moved / times.median("step"),
        "copy_bytes_per_second": copied / times.median("copy"),
    }  # fmt: skip
    share = times.ratio("copy", "step") * moved / copied
    return Row(subject, SHARE if flat else STAGES, share, target, detail=detail)


@functools.cache
def bytes_moved(name: str, shape: Shape, dtype: str = "float32") -> int:
    """The bytes that the stages of a rule read and write for a tensor of this shape, all arrays in this dtype."""
    rule, view = rule_of(name), matrix_view(shape, rule_of(name).view)
    program = rulec.compile(rule, {**view.facts, "machine_eps": EPS[dtype]})
    return round(sum(traffic(*kernel_for(program, dtype))) * prod(shape))


def parameter(bench: Bench, shape: Shape, dtype: str = "float32") -> Any:
    """A parameter with a gradient."""
    param = make(bench, shape, dtype).requires_grad_()
    param.grad = make(bench, shape, dtype)
    return param


def step_of(name: str, params: list[Any], **keywords: Any) -> Step:
    """Our step of a rule, by its name in the library or among the rules composed for the benchmarks."""
    import rulec.torch

    known = name if name in rulec.rules() else rule_of(name)
    step: Step = rulec.torch.optimizer(known)(params, **keywords).step
    return step


def _usable(one: TorchStep, param: Any) -> Step | str:
    """torch's step, or a sentence where it does not run on this device."""
    try:
        step = one.make([param])
        step()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return sentence(error)
    return step
