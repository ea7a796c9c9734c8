"""`rulec bench rules`: every elementwise rule on one large tensor, against the memory's limit and against torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import rulec
from benchmarks.kernels import Pair, Pool, bound, hyper_defaults, pair, threads
from benchmarks.result import Result, Row
from rulec.compiler.layout import layout_for
from rulec.language.library.load import interop_entries
from rulec.tools.compare.measure import Times, interleaved
from rulec.tools.compare.target import translate
from rulec.tools.display.kernels import traffic

FULL, QUICK = 50_000_000, 1_000_000
ROUNDS, QUICK_ROUNDS = 9, 3

#: The targets: of the limit's speed, in float32 and in half-width storage; against torch's fused kernels, and against
#: foreach where torch has no fused kernel.
OF_LIMIT, OF_LIMIT_HALF, OF_FUSED, OF_FOREACH = 0.95, 0.9, 1.0, 4.0

#: What the rows say.
LIMIT, LIMIT_HALF = "kernel, of the limit's speed", "kernel with 16-bit storage, of the limit's speed"
FUSED, FOREACH = "kernel, times as fast as torch's fused step", "kernel, times as fast as torch's foreach step"

#: Rules also measured in half-width storage: (rule, parameters and gradients, states).
HALF_WIDTH = tuple(
    (rule, dtype, states)
    for rule in ("sgd", "adamw", "lion", "nadam")
    for dtype in ("bfloat16", "float16")
    for states in ((dtype, "float32") if rule == "adamw" else (dtype,))
)


def measure(quick: bool, only: Sequence[str], advance: Callable[[], object] = lambda: None) -> Result:
    """The measurement; `only` restricts it to some rules, `advance` is called after every rule."""
    elements, rounds = (QUICK, QUICK_ROUNDS) if quick else (FULL, ROUNDS)
    pool = Pool(elements)
    notes: list[str] = []
    rows: list[Row] = []
    for name in plan(only):
        rows += list(_float32(name, pool, rounds, notes))
        advance()
    for name, dtype, states in half_width(only):
        rows.append(_half_width(name, dtype, states, pool, rounds))
        advance()
    return Result("rules", rows, quick, threads(), [f"one tensor of {elements:,} elements", *notes])


def plan(only: Sequence[str]) -> list[str]:
    """The rules measured: every elementwise one of the library, or those of `only`."""
    names = [name for name in rulec.rules() if not name.startswith("transforms/")]
    return [n for n in names if (not only or n in only) and rulec.compile(rulec.load(n)).elementwise]


def half_width(only: Sequence[str]) -> list[tuple[str, str, str]]:
    """The rules measured in half-width storage, as (rule, dtype, dtype of states)."""
    return [entry for entry in HALF_WIDTH if not only or entry[0] in only]


def _float32(name: str, pool: Pool, rounds: int, notes: list[str]) -> Iterator[Row]:
    program = rulec.compile(rulec.load(name))
    kernels = pair(program, layout_for(program, "float32"))
    contenders = _contenders(kernels, pool)
    theirs = _torch_step(name, pool)
    if isinstance(theirs, str):
        notes.append(f"{name}: {theirs}")
    elif theirs is not None:
        contenders["torch"] = theirs[1]
    times = interleaved(contenders, rounds)
    yield _limit_row(f"{name}, float32", kernels, times, pool.elements, LIMIT, OF_LIMIT)
    if "torch" in contenders and theirs is not None and not isinstance(theirs, str):
        kind = theirs[0]
        target, measure = (OF_FUSED, FUSED) if "fused" in kind else (OF_FOREACH, FOREACH)
        seconds = {contender: times.median(contender) for contender in ("kernel", "torch")}
        detail = {**seconds, "scatter": times.quartiles("torch", "kernel")}
        yield Row(f"{name}, {kind}", measure, times.ratio("torch", "kernel"), target, detail=detail)


def _half_width(name: str, dtype: str, states: str, pool: Pool, rounds: int) -> Row:
    program = rulec.compile(rulec.load(name))
    layout = layout_for(program, dtype, states=dict.fromkeys((b.name for b in program.states), states))
    kernels = pair(program, layout)
    times = interleaved(_contenders(kernels, pool), rounds)
    label = f"{name}, {dtype}" + ("" if states == dtype else f" with {states} states")
    return _limit_row(label, kernels, times, pool.elements, LIMIT_HALF, OF_LIMIT_HALF)


def _contenders(kernels: Pair, pool: Pool) -> dict[str, Callable[[], object]]:
    """The kernel and its limit over the same tensors; the limit does not change them."""
    arguments = (*pool.tensors(kernels), kernels.rows(1, (pool.elements,)), pool.inputs(kernels))
    return {"kernel": bound(kernels.kernel, *arguments), "limit": bound(kernels.limit, *arguments)}


def _limit_row(subject: str, kernels: Pair, times: Times, elements: int, measure: str, target: float) -> Row:
    moved = traffic(kernels.program, kernels.layout).total * elements
    detail = {
        "kernel": times.median("kernel"), "limit": times.median("limit"), "bytes": moved,
        "bytes_per_second": moved / times.median("kernel"), "scatter": times.quartiles("limit", "kernel"),
    }  # fmt: skip
    return Row(subject, measure, times.ratio("limit", "kernel"), target, detail=detail)


def _torch_step(name: str, pool: Pool) -> tuple[str, Callable[[], object]] | str | None:
    """torch's step for the same rule, after its name; a sentence where it cannot run; None where torch has no such."""
    rule = rulec.load(name).standalone()
    sections = interop_entries(rule, "torch")
    if not sections:
        return None
    try:
        import torch
    except ImportError:
        return "not compared with torch, which is not installed"
    entry: Any = sections[0]
    kind = getattr(torch.optim, entry["class"])
    fixed = {k: v for k, v in entry.get("when", {}).items() if v != "nonzero"}
    way = "fused" if "fused" in inspect.signature(kind).parameters else "foreach"
    keywords = translate(hyper_defaults(rulec.compile(rule)), kind, entry, {**fixed, way: True}).keywords
    tensor = torch.from_numpy(pool.array("torch p", "float32", positive=False)).requires_grad_()
    tensor.grad = torch.from_numpy(pool.array("torch g", "float32", positive=False))
    try:
        optimizer = kind([tensor], **keywords)
        optimizer.step()
    except (RuntimeError, ValueError, TypeError) as error:
        return f"torch.optim.{entry['class']}({way}=True) does not run here: {error}"
    return f"torch.optim.{entry['class']}({way}=True)", optimizer.step
