"""How a bucket is cut into chunks, the units of a kernel's loop, and chunks are joined to spans for threads.

A chunk lies in one tensor, and where it begins and ends follows from that tensor's shape alone: so the bits of a result
depend neither on the other tensors nor on threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .plan import CHUNK_COLUMNS

Table = np.ndarray[Any, np.dtype[np.int64]]


@dataclass
class Policy:
    """How long chunks are where kernels run in main memory, and how many neighbours are taken from a job at once.

    `spans` says how many spans a job has where there is work enough. A span is what a thread takes at once: chunks side
    by side, for starting to stream at a new place costs about a microsecond; of `smallest_span` elements at least, for
    fewer are not worth taking.
    """

    spans: Callable[[], int]
    smallest_span: int = 32768
    #: Elements in a chunk. A tensor's last chunk is shorter, and a chunk of a tall matrix may be larger.
    chunk: int = 32768
    #: Columns in a chunk of a matrix of many rows whose columns are reduced: sums of so many stay in a near cache.
    widest: int = 16384
    #: Rows in a chunk of a tall matrix, at least: a line of sums for each chunk must cost little beside its elements.
    least_rows: int = 64
    #: Chunks one above the other in one matrix, at most, for the same reason.
    most_pieces: int = 128


#: How many sets of tensors that are updated together a bucket remembers the spans of.
_KNOWN = 1024


class Chunks:
    """The chunks of a bucket: `table` has a row for each, those of a tensor one after the other.

    The chunks of tensor i are `first[i]` to `first[i + 1]`; `lengths` are their elements.
    """

    def __init__(self, table: Table, first: Sequence[int], lengths: Sequence[int], policy: Policy) -> None:
        self.table, self.first, self.lengths, self._policy = table, first, lengths, policy
        self._known: dict[tuple[int, ...], Table] = {}

    def spans(self, tensors: Iterable[int]) -> Table:
        """Rows (first chunk, last chunk + 1) over the chunks of these tensors."""
        chosen = tuple(tensors)
        found = self._known.get(chosen)
        if found is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            found = self._known[chosen] = self._joined(chosen)
        return found

    def _joined(self, tensors: Sequence[int]) -> Table:
        chunks = [chunk for tensor in tensors for chunk in range(self.first[tensor], self.first[tensor + 1])]
        # Of these tensors alone: one that is updated by itself is work for all threads, too.
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


def flat_chunks(sizes: Sequence[int], policy: Policy, columns: int = 3) -> Chunks:
    """Chunks of tensors of so many elements, as rows (tensor, start, stop) in a table of so many columns."""
    size = np.asarray(sizes, np.int64)
    count = -(-size // policy.chunk)
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(count)])
    tensor = np.repeat(np.arange(len(size)), count)
    start = (np.arange(first[-1]) - first[tensor]) * policy.chunk
    stop = np.minimum(start + policy.chunk, size[tensor])
    table = np.zeros((len(tensor), columns), np.int64)
    table[:, :3] = np.stack([tensor, start, stop], axis=1)
    return Chunks(table, first.tolist(), (stop - start).tolist(), policy)


@dataclass(frozen=True)
class Matrices:
    """A tensor as it lies in memory: `batch` matrices of `height` rows, `width` neighbouring elements each.

    A chunk has several whole matrices, or `lines` rows of one of them, `block` columns of each. Chunks are `tall` for a
    stage that reduces columns.
    """

    batch: int
    height: int
    width: int
    policy: Policy
    tall: bool = True

    @property
    def size(self) -> int:
        return self.batch * self.height * self.width

    @property
    def block(self) -> int:
        """The columns of a chunk."""
        most = max(self.policy.widest, self.policy.chunk // max(self.height, 1)) if self.tall else self.policy.chunk
        return self.width if self.width <= most else _even(self.width, most, 64)

    @property
    def lines(self) -> int:
        """The rows of a chunk."""
        enough = self.policy.chunk // max(self.block, 1)
        if self.tall:
            enough = max(enough, self.policy.least_rows, -(-self.height // self.policy.most_pieces))
        return self.height if self.height <= enough else _even(self.height, enough, 1)

    @property
    def blocks(self) -> int:
        """How many chunks lie side by side in a matrix; 1 where there is nothing to cut."""
        return max(1, -(-self.width // max(self.block, 1)))

    @property
    def pieces(self) -> int:
        """How many chunks lie one above the other in a matrix; 1 where there is nothing to cut."""
        return max(1, -(-self.height // max(self.lines, 1)))

    def chunks(self) -> list[tuple[int, ...]]:
        """The `CHUNK_COLUMNS` of each chunk, but for the tensor."""
        if not self.size:
            return []
        batch, height, width, lines, block = self.batch, self.height, self.width, self.lines, self.block
        if self.blocks == self.pieces == 1:
            step = max(1, self.policy.chunk // (height * width))
            return [
                (first, min(first + step, batch), height, width, 0, height, 0, width, 0, 0)
                for first in range(0, batch, step)
            ]
        return [
            (
                matrix, matrix + 1, height, width, top, min(top + lines, height), left, min(left + block, width),
                left // block * batch * height, top // lines * batch * width,
            )
            for matrix in range(batch) for top in range(0, height, lines) for left in range(0, width, block)
        ]  # fmt: skip


def matrix_chunks(tensors: Sequence[Matrices], policy: Policy) -> Chunks:
    """Chunks of tensors seen as matrices, as rows of `CHUNK_COLUMNS`."""
    rows: list[tuple[int, ...]] = []
    first = [0]
    for index, tensor in enumerate(tensors):
        rows += [(index, *chunk) for chunk in tensor.chunks()]
        first.append(len(rows))
    table = np.array(rows, np.int64).reshape(-1, len(CHUNK_COLUMNS))
    _, start, stop, _, _, top, bottom, left, right, _, _ = table.T
    return Chunks(table, first, ((stop - start) * (bottom - top) * (right - left)).tolist(), policy)


def _even(length: int, most: int, multiple: int) -> int:
    """How long the parts of a length are: about `most`, all but the last alike, and of a multiple."""
    part = -(-length // -(-length // most))
    return -(-part // multiple) * multiple
