"""The learning rate that a function of the step count stands for: its largest value.

Second learning rates follow `lr/lr_at_start`. A schedule may begin at 0, or near it, and so its start is its peak.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

#: Counts of steps that are looked at one by one, and how many more up to the last.
_DENSE, _SPARSE, _LAST = 1 << 16, 1 << 12, 2**31 - 2

Counts = np.ndarray[Any, np.dtype[np.int32]]


def peak_of(values_at: Callable[[Counts], Any]) -> float | None:
    """The largest value of a schedule; None where it has none above 0, or cannot be asked.

    `values_at` gives its values at many counts of steps. A schedule that grows without end counts as its first value.
    """
    later = np.geomspace(_DENSE, _LAST, _SPARSE)
    counts = np.concatenate([np.arange(_DENSE), np.unique(later.astype(np.int64))]).astype(np.int32)
    try:
        values = _finite(values_at(counts), len(counts))
        place = int(np.argmax(values))
        if place + 1 >= np.count_nonzero(np.isfinite(values)):
            peak = float(values[0])
        elif place < _DENSE - 1:
            peak = float(values[place])
        else:
            between = np.linspace(counts[place - 1], counts[place + 1], _DENSE).astype(np.int32)
            peak = float(np.max(_finite(values_at(between), len(between))))
    except Exception:  # noqa: BLE001 - a function of a user, that may want one count at a time
        return None
    return peak if 0 < peak < np.inf else None


def _finite(values: Any, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The values in float64, with the lowest in the place of any that is not finite."""
    spread = np.broadcast_to(np.asarray(values, np.float64), (count,))
    return np.where(np.isfinite(spread), spread, -np.inf)
