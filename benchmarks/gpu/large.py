"""The update of a tensor with more than 2**31 elements, compared with small ones at its ends and in its middle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Finding, Note, Part
from benchmarks.gpu.rules import parameter, step_of
from benchmarks.gpu.tensors import QUICK
from benchmarks.result import Row

ELEMENTS = 2**31 + 17

#: Elements of each piece that is looked at, and bytes for each of the tensor's: AdamW's four numbers.
PIECE, BYTES_EACH = 1 << 16, 16

STEPS = 3


def parts(only: Sequence[str]) -> list[Part]:
    """The one part, about AdamW."""
    return [] if only and "adamw" not in only else [Part("adamw's result at 2**31 + 17", large)]


def large(bench: Bench) -> Iterator[Finding]:
    """Steps of the tensor, and of copies of pieces of it: their bits must be the same."""
    import torch

    elements = QUICK + 17 if bench.quick else ELEMENTS
    free = bench.device.free_bytes()
    subject = f"adamw, one tensor of {elements:,} elements"
    if BYTES_EACH * elements > free:
        yield Note(f"{subject}: not run: it needs {BYTES_EACH * elements / 2**30:.0f} GiB of memory")
        return
    param = parameter(bench, (elements,))
    pieces = [slice(begin, begin + PIECE) for begin in places(elements)]
    small = [param.detach()[piece].clone().requires_grad_() for piece in pieces]
    for one, piece in zip(small, pieces, strict=True):
        one.grad = param.grad[piece].clone()
    step, steps = step_of("adamw", [param]), step_of("adamw", small)
    for _ in range(STEPS):
        step()
        steps()
    differ = sum(int((param.detach()[p] != s.detach()).sum()) for s, p in zip(small, pieces, strict=True))
    finite = all(bool(torch.isfinite(s).all()) for s in small)
    detail = {"elements": PIECE * len(pieces), "finite": finite}
    measure = "elements that differ from those of small tensors"
    yield Row(subject, measure, differ if finite else PIECE * len(pieces), 0, "at most", detail=detail)


def places(elements: int) -> list[int]:
    """Where the pieces begin: at the start, around multiples of 2**29, and at the end."""
    inner = [at - PIECE // 2 for at in range(1 << 29, elements - PIECE, 1 << 29)]
    return [0, *inner, elements - PIECE]
