"""Where a kernel leaves its partial reductions, and their finish in an order that never changes.

Slots are float64. One that no chunk writes keeps what reducing nothing gives: 0, or an infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rulec.compiler.reductions import REDUCTIONS
from rulec.language.node import Op

from .chunks import Chunks, Matrices

Numbers = np.ndarray[Any, np.dtype[np.float64]]
Whole = np.ndarray[Any, np.dtype[np.int64]]
Truth = np.ndarray[Any, np.dtype[np.bool_]]


class TensorSlots:
    """One slot for each chunk of a bucket, reduced to one number for each tensor."""

    def __init__(self, op: Op, chunks: Chunks) -> None:
        self._op = op
        self._first = np.array(chunks.first, np.int64)
        # One slot more than chunks: `reduceat` looks up the end of the last range.
        self._slots = np.full(len(chunks.table) + 1, REDUCTIONS[op].nothing)
        self._everything = self._ranges(np.arange(len(chunks.first) - 1))

    def _ranges(self, tensors: Whole) -> tuple[Truth, Whole]:
        """Which of these tensors have chunks, and the first and last + 1 of those that have."""
        starts, stops = self._first[tensors], self._first[tensors + 1]
        some = starts < stops
        return some, np.stack([starts[some], stops[some]], axis=1).ravel()

    def arrays(self) -> list[Numbers]:
        """What the kernel writes into, for each tensor: one array for all."""
        return [self._slots] * (len(self._first) - 1)

    def finished(self, tensors: Sequence[int] | None) -> Numbers:
        """One number for each of these tensors, or for all."""
        some, ranges = self._everything if tensors is None else self._ranges(np.array(tensors, np.int64))
        found = np.full(len(some), REDUCTIONS[self._op].nothing)
        if len(ranges):
            with np.errstate(all="ignore"):
                found[some] = REDUCTIONS[self._op].ufunc.reduceat(self._slots, ranges)[::2]
        return found


class LineSlots:
    """For each tensor one slot for each row, or column, of its matrices and each chunk that it passes through.

    The rows and columns are those in memory; results have the shape that the rule sees, one of `shapes`.
    """

    def __init__(self, op: Op, tensors: Sequence[Matrices], rows: bool, as_rows: bool) -> None:
        self.op = op
        kept = [(t.blocks, t.batch * t.height) if rows else (t.pieces, t.batch * t.width) for t in tensors]
        self._slots = [np.full(shape, REDUCTIONS[op].nothing) for shape in kept]
        self.shapes = [
            (t.batch, t.height if rows else t.width, 1) if as_rows else (t.batch, 1, t.height if rows else t.width)
            for t in tensors
        ]

    def arrays(self) -> list[Numbers]:
        """What the kernel writes into, for each tensor."""
        return self._slots

    def finished(self, tensors: Sequence[int] | None) -> list[Numbers]:
        """For each of these tensors, or for all, `(batch, rows, 1)` or `(batch, 1, cols)`.

        Some are the slots themselves: they hold until the tensor's next pass through this stage.
        """
        reduce = REDUCTIONS[self.op].ufunc.reduce
        fired = range(len(self._slots)) if tensors is None else tensors
        with np.errstate(all="ignore"):
            return [
                (slots[0] if len(slots) == 1 else reduce(slots, axis=0)).reshape(self.shapes[i])
                for i, slots in ((i, self._slots[i]) for i in fired)
            ]
