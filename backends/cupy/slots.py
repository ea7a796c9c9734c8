"""Where kernels leave their totals, and what joins them to results, in an order that never changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rulec.compiler.ir import Result
from rulec.compiler.reductions import REDUCTIONS

from .chunks import Chunks, Matrices, Table
from .memory import Memory
from .plan import FINISH, THREADS

#: Bytes of a total.
_BYTES = 8


class TensorSlots:
    """One slot for each chunk of a bucket, joined to one number for each tensor."""

    def __init__(self, result: Result, chunks: Chunks, memory: Memory) -> None:
        self._kind, self._first = REDUCTIONS[result.value.op].code, chunks.first
        self._slots = memory.empty(max(1, len(chunks.table)))
        self._found = memory.empty(max(1, len(chunks.first) - 1))
        self._at = memory.address(self._slots), memory.address(self._found)

    def addresses(self) -> list[int]:
        """Where each tensor's chunks leave their totals: each in a slot of its own."""
        return [self._at[0]] * (len(self._first) - 1)

    def finish(self, fired: Sequence[int]) -> list[tuple[int, ...]]:
        """What joins the totals of these tensors: `FINISH` words, a line for each block."""
        slots, found = self._at
        return [
            (slots + _BYTES * self._first[i], found + _BYTES * place, 1, 1, self._first[i + 1] - self._first[i],
             self._kind)
            for place, i in enumerate(fired)
        ]  # fmt: skip

    def results(self, fired: Sequence[int]) -> Any:
        """One number for each of these tensors; it holds until the next pass through the stage."""
        return self._found[: len(fired)]


class LineSlots:
    """For each tensor one slot for each row, or column, of its matrices and each tile that it passes through.

    Where a single tile has all of a line, its total is the result. Rows and columns are those in memory; results have
    the shape that the rule sees.
    """

    def __init__(self, result: Result, tensors: Sequence[Matrices], rows: bool, memory: Memory) -> None:
        self._kind = REDUCTIONS[result.value.op].code
        self._kept = [(t.blocks, t.batch * t.height) if rows else (t.pieces, t.batch * t.width) for t in tensors]
        self._empty = [not t.batch * t.height * t.width for t in tensors]
        ends = np.cumsum([0, *(lines for _, lines in self._kept)]).tolist()
        slots = np.cumsum([0, *(terms * lines if terms > 1 else 0 for terms, lines in self._kept)]).tolist()
        self._found, self._slots = memory.empty(max(1, ends[-1])), memory.empty(max(1, slots[-1]))
        found_at, slots_at = memory.address(self._found), memory.address(self._slots)
        self._targets = [found_at + _BYTES * start for start in ends[:-1]]
        self._sources = [
            slots_at + _BYTES * start if terms > 1 else target
            for (terms, _), start, target in zip(self._kept, slots[:-1], self._targets, strict=True)
        ]
        as_rows = "i" in result.axes.letters
        extents = [t.height if rows else t.width for t in tensors]
        shapes = [(t.batch, n, 1) if as_rows else (t.batch, 1, n) for t, n in zip(tensors, extents, strict=True)]
        self._views = [
            self._found[start:end].reshape(shape) for start, end, shape in zip(ends[:-1], ends[1:], shapes, strict=True)
        ]

    def addresses(self) -> list[int]:
        """Where each tensor's tiles leave their totals."""
        return self._sources

    def finish(self, fired: Sequence[int]) -> list[tuple[int, ...]]:
        """What joins the totals of these tensors: `FINISH` words, a line for each block."""
        found: list[tuple[int, ...]] = []
        for i in fired:
            terms, lines = self._kept[i]
            if terms == 1 and not self._empty[i]:
                continue
            for start in range(0, lines, THREADS):
                source, target = (at[i] + _BYTES * start for at in (self._sources, self._targets))
                count = min(THREADS, lines - start)
                found.append((source, target, count, lines, 0 if self._empty[i] else terms, self._kind))
        return found

    def results(self, fired: Sequence[int]) -> list[Any]:
        """`(batch, rows, 1)` or `(batch, 1, cols)` for each of these tensors, until the next pass through the stage."""
        return [self._views[i] for i in fired]


def finish_table(slots: Sequence[TensorSlots | LineSlots], fired: Sequence[int]) -> Table:
    """What the blocks of a finish do."""
    rows = [row for own in slots for row in own.finish(fired)]
    return np.array(rows, np.int64).reshape(-1, len(FINISH))
