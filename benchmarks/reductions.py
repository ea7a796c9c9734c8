"""`rulec bench reductions`: rules with reductions on one large tensor, against their limit and other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import rulec
from benchmarks.kernels import Pool, threads
from benchmarks.peers import makers
from benchmarks.result import Result, Row
from benchmarks.stages import Shape, staged
from benchmarks.tensors import have_torch, tensors
from rulec.compiler.ir import Program
from rulec.language.expr.node import Kind, walk
from rulec.language.rule import Rule
from rulec.tools.compare.measure import interleaved

#: The matrix that steps are measured on.
FULL, QUICK = (5000, 10_000), (500, 1000)
ROUNDS, QUICK_ROUNDS = 9, 3

#: The targets of some rules: of the limit's speed, and times as fast as others.
OF_PYTHON = 4.0
CLIPPED = "clip_by_global_norm >> adamw"
JUDGED = ("lamb", "cautious_adamw", CLIPPED)
OF_LIMIT = {**dict.fromkeys(JUDGED, 0.9), **dict.fromkeys(("adafactor", "came", "sm3"), 0.92)}

#: Of the clipped AdamW against torch's fused one: (tensors, elements of each or None for one as large as the others,
#: times as fast, rounds).
AGAINST_FUSED = ((1, None, 1.2, ROUNDS), (1000, 1000, 8.0, 41))

#: What the rows say.
LIMIT = "step, of the speed of its stages' limit"
PYTHON = "step, times as fast as the fastest Python implementation"
FUSED = "step, times as fast as torch's clipping and fused step"


def measure(quick: bool, only: Sequence[str], advance: Callable[[], object] = lambda: None) -> Result:
    """The measurement; `only` restricts it to some rules, `advance` is called after every part."""
    shape, rounds = (QUICK, QUICK_ROUNDS) if quick else (FULL, ROUNDS)
    elements = shape[0] * shape[1]
    notes = [f"one matrix of {shape[0]:,} by {shape[1]:,}, float32"]
    pool = Pool(elements)
    rows: list[Row] = []
    for name in plan(only):
        rows.append(_limit(name, shape, pool, rounds))
        advance()
    with_torch = have_torch(notes)
    for name in judged(only):
        rows += _python(name, elements, rounds) if with_torch else ()
        advance()
    for count, size, target, full_rounds in against_fused(only):
        if with_torch:
            rows.append(_fused(count, size or elements, target, rounds if quick else full_rounds))
        advance()
    return Result("reductions", rows, quick, threads(), notes)


def parts(only: Sequence[str]) -> int:
    """The number of calls of `advance` in `measure`."""
    return len(plan(only)) + len(judged(only)) + len(against_fused(only))


def plan(only: Sequence[str]) -> list[str]:
    """The rules compared with their limits: all of the library with reductions and without matrix functions.

    The clipped AdamW is among them where AdamW or the clipping is.
    """
    names = [n for n in rulec.rules() if not n.startswith("transforms/") and (not only or n in only)]
    reducing = [*JUDGED, *(n for n in names if n not in JUDGED and _reduces(n))]
    return [n for n in reducing if n in names or (n == CLIPPED and _clips(only))]


def judged(only: Sequence[str]) -> list[str]:
    """The rules compared with Python implementations."""
    return [name for name in plan(only) if name in JUDGED]


def against_fused(only: Sequence[str]) -> list[tuple[int, int | None, float, int]]:
    """The sizes at which clipping and AdamW are compared with torch's."""
    return [size for size in AGAINST_FUSED if _clips(only)]


def _clips(only: Sequence[str]) -> bool:
    return not only or "adamw" in only or "transforms/clip_by_global_norm" in only


def _reduces(name: str) -> bool:
    rule = rulec.load(name)
    program = rulec.compile(rule)
    return not (program.elementwise or rule.inputs or _has_matrix_functions(program))


def _has_matrix_functions(program: Program) -> bool:
    """Whether a program multiplies, decomposes or orthogonalizes anything."""
    roots = [root for stage in program.stages for root in stage.roots]
    roots += [c.value for c in program.late] + [v.value for v in program.vectors] + [s.value for s in program.finish]
    return any(value.op.kind is Kind.MATRIX for value in walk(roots))


def rule_of(name: str) -> Rule:
    """The rule of a row."""
    if name == CLIPPED:
        return rulec.load("transforms/clip_by_global_norm") >> rulec.load("adamw")
    return rulec.load(name)


def _limit(name: str, shape: Shape, pool: Pool, rounds: int) -> Row:
    whole = staged(rule_of(name), shape, pool)
    times = interleaved({"step": whole.step, "limit": whole.limit}, rounds)
    moved = whole.bytes_per_element * pool.elements
    detail = {
        **times.medians(), "stages": len(whole.program.stages), "bytes": moved,
        "bytes_per_second": moved / times.median("step"), "scatter": times.quartiles("limit", "step"),
    }  # fmt: skip
    return Row(name, LIMIT, times.ratio("limit", "step"), OF_LIMIT.get(name), detail=detail)


def _python(name: str, elements: int, rounds: int) -> Iterator[Row]:
    """Ours against the fastest installed Python implementation, by medians; fused kernels do not count as Python."""
    theirs = {kind: make(tensors(1, elements)) for kind, make in makers(name).items() if "fused" not in kind}
    times = interleaved({"step": _our_step(name, tensors(1, elements)), **theirs}, rounds)
    fastest = min(theirs, key=times.median)
    detail = {**times.medians(), "scatter": times.quartiles(fastest, "step")}
    yield Row(f"{name}, {fastest}", PYTHON, times.ratio(fastest, "step"), OF_PYTHON, detail=detail)


def _fused(count: int, elements: int, target: float, rounds: int) -> Row:
    """Ours against torch's clipping and fused step. Of many small tensors each side finds its own in the cache."""
    ((kind, make),) = ((kind, make) for kind, make in makers(CLIPPED).items() if "fused" in kind)
    contenders = {"step": _our_step(CLIPPED, tensors(count, elements)), "torch": make(tensors(count, elements))}
    times = interleaved(contenders, rounds, settled=count > 1)
    detail = {**times.medians(), "scatter": times.quartiles("torch", "step")}
    subject = f"{CLIPPED}, {count} tensor{'s' * (count > 1)} of {elements:,}, {kind}"
    return Row(subject, FUSED, times.ratio("torch", "step"), target, detail=detail)


def _our_step(name: str, params: list[Any]) -> Callable[[], object]:
    import rulec.torch

    step: Callable[[], object] = rulec.torch.optimizer(rule_of(name))(params).step
    return step
