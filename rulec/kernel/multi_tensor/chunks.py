"""Chunk tables of kernels in main memory, and spans of chunks: a thread takes one span from a job at once.

The printed source and its caller both take the columns of the tables from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.kernel.place import is_shaped

from .address import array_address
from .cut import Cut, Lying, Whole, parts, rows_of

#: Most sets of tensors updated together with their spans remembered.
_KNOWN = 1024


@dataclass
class Policy:
    """The sizes of chunks and spans in main memory.

    A thread takes a span at once: neighbouring chunks, because streaming from a new place costs about a microsecond to
    start. A span has at least `smallest_span` elements, for fewer are not worth taking. `spans` gives the number of
    spans of a job with enough work.
    """

    spans: Callable[[], int]
    smallest_span: int = 32768
    #: Elements in a chunk. A tensor's last chunk is shorter, and a chunk of a tall matrix may be larger.
    chunk: int = 32768
    #: Columns in a chunk of a tall matrix with values of columns: they stay in a near cache.
    widest: int = 16384
    #: Rows in a chunk of a tall matrix, at least: a line of sums for each chunk must cost little beside its elements.
    least_rows: int = 64
    #: Chunks one above the other in one matrix, at most, for the same reason.
    most_pieces: int = 40

    def flat(self, tensors: Lying) -> Cut:
        """Tensors as single rows, cut for a stage without rows and columns."""
        return Cut(tensors, 1, 1, self.chunk)

    def cut(self, tensors: Lying, tall: bool) -> Cut:
        """Matrices in chunks of several of them, or of a part of one; `tall` for a stage with values of columns."""
        height, width = tensors.height, tensors.width
        most = np.maximum(self.widest, self.chunk // np.maximum(height, 1)) if tall else self.chunk
        wide = _even(width, most, 64)
        enough = self.chunk // np.maximum(wide, 1)
        if tall:
            enough = np.maximum(np.maximum(enough, self.least_rows), parts(height, self.most_pieces))
        lines = _even(height, enough, 1)
        together = np.maximum(1, self.chunk // np.maximum(height * width, 1))
        return Cut(tensors, np.where((wide < width) | (lines < height), 1, together), lines, wide)


class Chunks:
    """The chunks of a bucket: `table` has a row for each, those of a tensor one after the other.

    The chunks of tensor i are `first[i]` to `first[i + 1]`; `lengths` are their elements. The table is at the address
    `at`.
    """

    def __init__(self, cut: Cut, columns: Sequence[str], policy: Policy) -> None:
        self.cut, self.table, self._policy = cut, cut.table(columns), policy
        self.at = array_address(self.table)
        words = cut.words
        boxes = [(words["first"], words["last"]), (words["top"], words["bottom"]), (words["left"], words["right"])]
        self.lengths = np.prod([stop - start for start, stop in boxes], axis=0, dtype=np.int64).tolist()
        self.first: list[int] = cut.first.tolist()
        self._known = lru_cache(_KNOWN)(self._joined)

    def spans(self, tensors: Iterable[int]) -> Whole:
        """Rows (first chunk, last chunk + 1) over the chunks of these tensors."""
        return self._known(tuple(tensors))

    def _joined(self, tensors: tuple[int, ...]) -> Whole:
        chunks = [chunk for tensor in tensors for chunk in range(self.first[tensor], self.first[tensor + 1])]
        # Of these tensors alone: a single tensor is work for all threads, too.
        total = sum(self.lengths[chunk] for chunk in chunks)
        held = least = max(self._policy.smallest_span, total // self._policy.spans())
        spans: list[list[int]] = []
        for chunk in chunks:
            if held >= least or spans[-1][1] != chunk:
                spans.append([chunk, chunk])
                held = 0
            spans[-1][1] = chunk + 1
            held += self.lengths[chunk]
        return np.array(spans, np.int64).reshape(-1, 2)


def flat_chunks(sizes: Sequence[int], policy: Policy) -> Chunks:
    """Chunks of tensors with these numbers of elements, as rows (tensor, start, stop)."""
    return Chunks(policy.flat(rows_of(sizes)), FLAT_COLUMNS, policy)


def _even(length: Whole, most: Whole | int, multiple: int) -> Whole:
    """The length of the equal parts of a length, at most `most`: a multiple of `multiple` where it is cut.

    The last part may be shorter.
    """
    part = parts(length, parts(length, most))
    return np.where(length <= most, length, parts(part, multiple) * multiple)


#: Columns of a chunk's row without matrices, by the names of `Cut.words`: neighbouring elements of one tensor.
FLAT_COLUMNS = ("tensor", "left", "right")

#: Columns of a chunk's row in the chunk table of a program with matrices. `first` and `last` are a range of matrices,
#: or of elements in a stage without matrices; rows and columns are as in memory.
CHUNK_COLUMNS = (
    "tensor", "first", "last", "height", "width", "top", "bottom", "left", "right", "row_slots", "col_slots",
)  # fmt: skip


def chunk_columns(program: Program, layout: Layout) -> int:
    """The number of columns of a program's chunk tables."""
    shaped = any(is_shaped(program, stage, layout) for stage in program.stages)
    return len(CHUNK_COLUMNS if shaped else FLAT_COLUMNS)
