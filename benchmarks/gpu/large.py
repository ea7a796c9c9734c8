"""Updates past 2**31 elements, and of 20,000 tensors: their bits against those of the same numbers in other tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Finding, Note, Part
from benchmarks.gpu.rules import parameter, step_of
from benchmarks.gpu.tensors import QUICK
from benchmarks.result import Row

ELEMENTS = 2**31 + 17

#: Elements of each piece that is looked at, and the arrays of a tensor: AdamW's four.
PIECE, ARRAYS = 1 << 16, 4

#: Tensors of the other test, and the most elements of one: their sizes are all kinds up to that.
COUNT, QUICK_COUNT, LARGEST = 20_000, 50, 1500

STEPS = 3

#: Dtype -> its bytes.
DTYPES = {"float32": 4, "float64": 8}


def parts(only: Sequence[str]) -> list[Part]:
    """Each test in each dtype, about AdamW."""
    if only and "adamw" not in only:
        return []
    return [
        *(Part(f"adamw's result at 2**31 + 17 in {dtype}", large, (dtype,)) for dtype in DTYPES),
        *(Part(f"adamw's result of 20,000 tensors in {dtype}", many, (dtype,)) for dtype in DTYPES),
    ]


def large(bench: Bench, dtype: str = "float32") -> Iterator[Finding]:
    """Steps of the tensor, and of copies of pieces of it: their bits must be the same."""
    elements = QUICK + 17 if bench.quick else ELEMENTS
    free, needed = bench.device.free_bytes(), ARRAYS * DTYPES[dtype] * elements
    subject = f"adamw, one tensor of {elements:,} elements{_of(dtype)}"
    if needed > free:
        yield Note(f"{subject}: not run: it needs {needed / 2**30:.0f} GiB of memory")
        return
    pieces = [slice(begin, begin + PIECE) for begin in places(elements)]
    yield _compared(bench, subject, "elements that differ from those of small tensors", elements, pieces, dtype)


def many(bench: Bench, dtype: str = "float32") -> Iterator[Finding]:
    """Steps of the tensors, and of one tensor with all their elements: their bits must be the same."""
    count = QUICK_COUNT if bench.quick else COUNT
    pieces = consecutive(count)
    subject = f"adamw, {count:,} tensors{_of(dtype)}"
    measure = "elements that differ from those of one tensor"
    yield _compared(bench, subject, measure, pieces[-1].stop, pieces, dtype)


def _of(dtype: str) -> str:
    return "" if dtype == "float32" else f", {dtype}"


def _compared(
    bench: Bench, subject: str, measure: str, elements: int, pieces: Sequence[slice], dtype: str
) -> Row:  # fmt: skip
    """The number of elements of pieces that differ from tensors of their own, after some steps of both."""
    import torch

    param = parameter(bench, (elements,), dtype)
    small = [param.detach()[piece].clone().requires_grad_() for piece in pieces]
    for one, piece in zip(small, pieces, strict=True):
        one.grad = param.grad[piece].clone()
    step, steps = step_of("adamw", [param]), step_of("adamw", small)
    for _ in range(STEPS):
        step()
        steps()
    ours, theirs = torch.cat([param.detach()[p] for p in pieces]), torch.cat([s.detach() for s in small])
    finite = bool(torch.isfinite(theirs).all())
    differ = int((ours != theirs).sum()) if finite else theirs.numel()
    return Row(subject, measure, differ, 0, "at most", detail={"elements": theirs.numel(), "finite": finite})


def places(elements: int) -> list[int]:
    """Where the pieces begin: at the start, around multiples of 2**29, and at the end."""
    inner = [at - PIECE // 2 for at in range(1 << 29, elements - PIECE, 1 << 29)]
    return [0, *inner, elements - PIECE]


def consecutive(count: int) -> list[slice]:
    """Pieces one after the other, of sizes that are no multiples of anything."""
    pieces, begin = [], 0
    for number in range(count):
        end = begin + 1 + number * 619 % LARGEST
        pieces.append(slice(begin, end))
        begin = end
    return pieces
