"""Prints the reduction of runs of a vector of float64: one program of the grid for each run.

The lanes of a program take in the terms of its run in rounds, and are then joined. So the order of adding depends on
the number of terms alone, and a run has the same bits whatever its neighbours are.
"""

from __future__ import annotations

from .words import source_text, words_used

_SEGMENTS = '''\
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
    return source_text(title, [*words_used(_SEGMENTS), _SEGMENTS])
