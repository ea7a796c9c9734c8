"""The reduction of runs of a vector by a backend's own kernel, between the stages of a step on its device.

A backend may offer it by two more methods. `emit_segments()` is the source of the kernel; it is pure.
`build_segments(source)` is the ReducesSegments.
"""

from __future__ import annotations

from typing import Any, Protocol

from rulec.language.expr.node import Op


class ReducesSegments(Protocol):
    """Reduces runs of a contiguous vector of float64, each to a number of float64.

    `ends` has the end of each run after a 0, in int64 on the device of the vector. The order of adding depends on the
    number of terms alone, so a run has the same bits whatever its neighbours are. NaN among the terms gives NaN.
    """

    def __call__(self, op: Op, values: Any, ends: Any) -> Any: ...
