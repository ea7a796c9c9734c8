"""The reduction of runs by the triton backend beside exact ones, in Triton's interpreter or on a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from rulec.backend import registry
from rulec.language.expr.node import Op

#: Runs of no term, of one, and of numbers of terms about those that are read at once.
LENGTHS = (0, 1, 300, 2047, 2048, 2049, 0, 5000, 8192)

OPS = (Op.SUM, Op.MIN, Op.MAX)

_WANTED: dict[Op, Any] = {
    Op.SUM: math.fsum, Op.MIN: lambda x: min(x, default=math.inf), Op.MAX: lambda x: max(x, default=-math.inf)
}  # fmt: skip


def reduction() -> Any:
    """The triton backend's."""
    backend: Any = registry.get("triton")
    return backend.build_segments(backend.emit_segments())


def ends_of(lengths: Sequence[int], device: str = "cpu") -> torch.Tensor:
    """The ends of runs of these lengths, after a 0."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device)


def drawn(lengths: Sequence[int]) -> torch.Tensor:
    """Normal numbers for runs of these lengths."""
    return torch.randn(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def wrong(device: str = "cpu") -> list[str]:
    """What is not as it should be: results far from exact ones, or with NaN in the wrong place."""
    values, ends, by = drawn(LENGTHS), ends_of(LENGTHS, device), reduction()
    runs = torch.split(values, LENGTHS)
    failed = []
    for op in OPS:
        found = by(op, values.to(device), ends).tolist()
        for run, number in zip(runs, found, strict=True):
            wanted = _WANTED[op](run.tolist())
            scale = 2.0**-50 * float(run.abs().sum()) if op is Op.SUM else 0.0
            if number != wanted and not abs(number - wanted) <= scale:
                failed.append(f"{op.name} of {len(run)}: {number} for {wanted}")
    broken = values.clone()
    broken[301] = math.nan
    for op in OPS:
        found = torch.isnan(by(op, broken.to(device), ends)).tolist()
        if found != [i == LENGTHS.index(2047) for i in range(len(LENGTHS))]:
            failed.append(f"NaN in {op.name}: {found}")
    return failed


def depends_on_neighbours(device: str = "cpu") -> list[int]:
    """The lengths of runs whose sums have other bits alone, or at another place in memory."""
    values, by = drawn(LENGTHS), reduction()
    together = by(Op.SUM, values.to(device), ends_of(LENGTHS, device)).tolist()
    different = []
    for run, number in zip(torch.split(values, LENGTHS), together, strict=True):
        alone = by(Op.SUM, run.to(device), ends_of([len(run)], device)).tolist()
        shifted = torch.cat([torch.ones(3, dtype=torch.float64), run, torch.ones(64, dtype=torch.float64)]).to(device)
        behind = by(Op.SUM, shifted, ends_of([3, len(run), *[1] * 64], device)).tolist()
        if alone[0] != number or behind[1] != number:
            different.append(len(run))
    return different
