"""The reduction of runs of a vector of float64 in Triton: one program of the grid for each run, one launch for all.

The lanes of a program take in the terms of its run in rounds, and are then combined. So the order of adding depends on
the number of terms alone, and a run has the same bits whatever its neighbours are.
"""

from __future__ import annotations

from typing import Any

from rulec.array_api.reductions import REDUCTIONS
from rulec.errors import BackendUnavailable
from rulec.language.expr.node import Op

from .memory import current
from .words import source_text, words_used
from .work import compiler_errors, refusal

#: The kernel.
SEGMENTS = '''\
@triton.jit(do_not_specialize=["values", "ends", "results"])
def segments(values, ends, results, KIND: tl.constexpr, LANES: tl.constexpr):
    """The sum (KIND 0), minimum (1) or maximum (2) of each run; `ends` has the end of each, after a 0."""
    run = tl.program_id(0)
    start, stop = tl.load(ends + run), tl.load(ends + run + 1)
    lane = tl.arange(0, LANES)
    nothing = 0.0 if KIND == 0 else (float("inf") if KIND == 1 else -float("inf"))
    total = tl.full((LANES,), nothing, tl.float64)
    for first in range(start, stop, LANES):
        inside = first + lane < stop
        x = tl.load(values + first + lane, mask=inside, other=nothing)
        if KIND == 0:
            total += x
        elif KIND == 1:
            total = tl.minimum(total, x, propagate_nan=tl.PropagateNan.ALL)
        else:
            total = tl.maximum(total, x, propagate_nan=tl.PropagateNan.ALL)
    if KIND == 0:
        tl.store(results + run, tl.sum(total))
    elif KIND == 1:
        tl.store(results + run, lowest(total))
    else:
        tl.store(results + run, highest(total))
'''


def segments_source() -> str:
    """The whole file: the kernel `segments`."""
    title = "The reduction of runs of a vector by the triton backend. Printed by rulec."
    return source_text(title, [*words_used(SEGMENTS), SEGMENTS])


#: The terms of a run that are read at once, and the warps for them. Bits depend on the first number.
LANES, WARPS = 2048, 8


class Segments:
    """The reductions of runs of vectors on one GPU."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __call__(self, op: Op, values: Any, ends: Any) -> Any:
        """Runs of a contiguous vector of float64, each reduced to a number. `ends` has the end of each, after a 0."""
        results = values.new_empty(len(ends) - 1)
        if not len(results):
            return results
        with current(values.device, None):
            try:
                self._kernel[(len(results),)](
                    values, ends, results, KIND=REDUCTIONS[op].code, LANES=LANES, num_warps=WARPS,
                    enable_fp_fusion=False,
                )  # fmt: skip
            except compiler_errors() as error:
                raise BackendUnavailable(refusal("a sum of rows", values.device, error)) from error
        return results
