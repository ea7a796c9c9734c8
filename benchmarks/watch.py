"""`rulec bench watch`: steps that measure statistics, against the same steps without, and torch's operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.kernels import threads
from benchmarks.result import Result, Row
from benchmarks.tensors import have_torch
from rulec.tools.compare.measure import Times, interleaved

#: Optimizer -> the shapes of its parameters; 50 million elements each, and Muon's matrices of 1024.
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "AdamW": [(50_000_000,)], "Lion": [(50_000_000,)], "LAMB": [(50_000_000,)], "Muon": [(1024, 1024)] * 4,
}  # fmt: skip
QUICK = 100_000

#: Many small tensors: their number, and the elements of each.
MANY, SMALL = 1000, 1000

ROUNDS, QUICK_ROUNDS = 7, 3

#: Most of the time of a step without statistics.
MOST, MOST_OF_MANY = 1.1, 1.25

#: What is measured, one line of progress for each.
PARTS = len(SHAPES) + 1

WITH, BY_TORCH = "step with the set norms, of the time without", "norms by torch after the step, of the time without"


def measure(quick: bool, advance: Callable[[], object] = lambda: None) -> Result:
    """The measurement, in float32; `advance` is called after every optimizer."""
    notes: list[str] = []
    rows: list[Row] = []
    if have_torch(notes):
        for name, shapes in SHAPES.items():
            shapes = [(QUICK,)] if quick and len(shapes) == 1 else [(64, 64)] if quick else shapes
            rows += _rows(name, f"{name}, {_label(shapes)}", shapes, MOST, quick)
            advance()
        shapes = [(SMALL,)] * (MANY // 10 if quick else MANY)
        rows += _rows("AdamW", f"AdamW, {_label(shapes)}", shapes, MOST_OF_MANY, quick)
        advance()
    return Result("watch", rows, quick, threads(), notes)


def _label(shapes: list[tuple[int, ...]]) -> str:
    extents = " by ".join(f"{n:,}" for n in shapes[0])
    return f"{extents} elements" if len(shapes) == 1 else f"{len(shapes)} tensors of {extents}"


def _rows(name: str, label: str, shapes: list[tuple[int, ...]], most: float, quick: bool) -> Iterator[Row]:
    times = interleaved(_contenders(name, shapes), QUICK_ROUNDS if quick else ROUNDS)
    yield _row(label, WITH, times, "measuring", most)
    yield _row(label, BY_TORCH, times, "by torch", None)


def _row(label: str, what: str, times: Times, contender: str, most: float | None) -> Row:
    detail = {**times.medians(), "scatter": times.quartiles(contender, "plain")}
    return Row(label, what, times.ratio(contender, "plain"), most, "at most", detail=detail)


def _contenders(name: str, shapes: list[tuple[int, ...]]) -> dict[str, Callable[[], object]]:
    """Steps without statistics, with them, and followed by the same norms in torch; over the same tensors."""
    import torch

    import rulec.torch

    params = [torch.randn(shape).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    kind = getattr(rulec.torch, name)
    plain, measuring = kind(params), kind(params, watch="norms")
    kept = [torch.empty_like(param) for param in params]

    def by_torch() -> list[Any]:
        """The step between a copy of the parameters and the norms that need it."""
        with torch.no_grad():
            for copy, param in zip(kept, params, strict=True):
                copy.copy_(param)
            plain.step()
            return [_norms(param, copy) for param, copy in zip(params, kept, strict=True)]

    return {"plain": plain.step, "measuring": measuring.step, "by torch": by_torch}


def _norms(param: Any, old: Any) -> tuple[Any, ...]:
    """The set `norms` of a parameter, from its value before the step and its gradient, by torch's operations."""
    grad, update = param.grad, param - old
    norms = [each.norm() for each in (grad, update, old)]
    cosine = (update * grad).sum() / (norms[0] * norms[1])
    return (*norms, norms[1] / norms[2], norms[0] / norms[2], cosine, (~grad.isfinite()).sum(), (update == 0).sum())
