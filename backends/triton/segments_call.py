"""Calls of the kernel that reduces runs of a vector: one launch for all runs."""

from __future__ import annotations

from typing import Any

from rulec.array_api.reductions import REDUCTIONS
from rulec.errors import BackendUnavailable
from rulec.language.expr.node import Op

from .memory import current
from .work import compiler_errors, refusal

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
