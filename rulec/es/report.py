"""The report of an update."""

from __future__ import annotations

import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """The update of one step, by number from 0.

    `directions` counted; `dropped` members had no finite fitness. Where too few were left the step was `skipped`:
    nothing was estimated. `unused` are the names of parameters that no forward of the step came by: they have no
    gradient. `fused` are the names of parameters that were updated from their noise, without a gradient. The gradients
    of the others took `gradient_bytes`.
    """

    step: int
    directions: int
    dropped: int = 0
    skipped: bool = False
    unused: tuple[str, ...] = ()
    fused: tuple[str, ...] = ()
    gradient_bytes: int = 0


def skipped(step: int, dropped: int, members: int, stacklevel: int) -> Report:
    """The report of a step in which too few members had a finite fitness; a RuntimeWarning says so."""
    warnings.warn(
        f"step {step} is skipped: {dropped} of {members} members have no finite fitness; nothing is updated",
        RuntimeWarning, stacklevel=stacklevel + 1,
    )  # fmt: skip
    return Report(step, 0, dropped, skipped=True)
