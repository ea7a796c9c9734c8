"""The chunks of a bucket's tensors, which are the units of a kernel's work, and the tensors bound to a kernel.

A chunk lies in one tensor, and follows from the tensor's shape alone: so the bits of a result depend neither on the
other tensors nor on the order of chunks and threads. All machines use this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rulec.compiler.ir import Program, Stage
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.errors import InternalError
from rulec.kernel.multi_tensor.arguments import Moving, byte_counts, in_memory
from rulec.kernel.place import is_shaped, moving_lines

Whole = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Lying:
    """Tensors in memory: `batch` matrices of `height` rows, `width` neighbouring elements each.

    Each is a vector of one number for every tensor.
    """

    batch: Whole
    height: Whole
    width: Whole

    @property
    def size(self) -> Whole:
        """The number of elements of each."""
        return self.batch * self.height * self.width

    @property
    def on_end(self) -> Lying:
        """The same with all matrices of a tensor one below the other, as one matrix."""
        return Lying(np.ones_like(self.batch), self.batch * self.height, self.width)


def rows_of(sizes: Sequence[int]) -> Lying:
    """Tensors with these numbers of elements, each a single row."""
    width = np.asarray(sizes, np.int64)
    return Lying(np.ones_like(width), np.ones_like(width), width)


def lying(views: Sequence[MatrixView], transposed: bool) -> Lying:
    """Tensors as the matrices of the rule; InternalError where a view does not fit the layout."""
    return Lying(*np.array([in_memory(view, transposed) for view in views], np.int64).reshape(-1, 3).T)


class Cut:
    """Tensors in chunks: of `matrices` matrices, and of `lines` rows and `wide` columns of each.

    The numbers are vectors, over tensors. In a tensor, chunks side by side come first, then chunks one below the other,
    then other matrices. There are `across` side by side and `deep` one below the other in a matrix, `counts` in a
    tensor. Chunk 0 of tensor i is chunk `first[i]` of all.
    """

    def __init__(self, tensors: Lying, matrices: Any, lines: Any, wide: Any) -> None:
        self.tensors, self.matrices, self.lines, self.wide = tensors, *(
            np.broadcast_to(np.asarray(x, np.int64), tensors.width.shape) for x in (matrices, lines, wide)
        )  # fmt: skip
        self.across, self.deep = parts(tensors.width, self.wide), parts(tensors.height, self.lines)
        self.counts = self.across * self.deep * parts(tensors.batch, self.matrices)
        self.first = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts)])

    def numbered(self, tensors: Sequence[int] | Whole) -> tuple[Whole, Whole]:
        """For every chunk of these tensors, in their order: its tensor, and its number within the tensor."""
        chosen = np.asarray(tensors, np.int64)
        place, number = counted(self.counts[chosen])
        return chosen[place], number

    @cached_property
    def words(self) -> dict[str, Whole]:
        """The numbers of every chunk, by name.

        A chunk has the matrices `first` to `last`, the rows `top` to `bottom` and the columns `left` to `right` of
        each. `slot` is its number among all chunks. Among the slots of its tensor, the slots of its rows begin at
        `row_slots`, and the slots of its columns at `col_slots`.
        """
        tensor, number = self.numbered(np.arange(len(self.counts)))
        batch, height, width, matrices, lines, wide, across, deep = (
            x[tensor]
            for x in (
                self.tensors.batch, self.tensors.height, self.tensors.width, self.matrices, self.lines, self.wide,
                self.across, self.deep,
            )
        )  # fmt: skip
        beside, below, matrix = number % across, number // across % deep, number // (across * deep) * matrices
        return {
            "tensor": tensor, "slot": np.arange(len(tensor)), "height": height, "width": width,
            "first": matrix, "last": np.minimum(matrix + matrices, batch),
            "top": below * lines, "bottom": np.minimum((below + 1) * lines, height),
            "left": beside * wide, "right": np.minimum((beside + 1) * wide, width),
            "row_slots": beside * batch * height, "col_slots": below * batch * width,
        }  # fmt: skip

    def table(self, columns: Sequence[str], **more: Whole) -> Whole:
        """A row of `words` and of `more` words for every chunk; columns under other names are zero."""
        table, words = np.zeros((int(self.first[-1]), len(columns)), np.int64), {**self.words, **more}
        for column, name in enumerate(columns):
            if name in words:
                table[:, column] = words[name]
        return table

    def rows(self, tensors: Sequence[int] | Whole) -> Whole:
        """The rows of these tensors in the table."""
        tensor, number = self.numbered(tensors)
        return self.first[tensor] + number


def counted(counts: Whole) -> tuple[Whole, Whole]:
    """The items of several groups of these sizes, one after the other: each item's group, and its number within it."""
    before = np.cumsum(counts) - counts
    return np.repeat(np.arange(len(counts)), counts), np.arange(int(counts.sum())) - np.repeat(before, counts)


def parts(length: Whole, part: Whole | int) -> Whole:
    """The number of parts of a length; the last part may be shorter."""
    count: Whole = -(-length // np.maximum(part, 1))
    return count


class Tensors:
    """Tensors with these numbers of elements and matrix views, under a program of a `backend`.

    InternalError where the program sees matrices, and a view is missing or does not fit the layout.
    """

    def __init__(
        self, backend: str, program: Program, layout: Layout, sizes: Sequence[int], views: Sequence[MatrixView]
    ) -> None:
        self.backend, self.program, self.layout, self.sizes = backend, program, layout, sizes
        shaped = any(is_shaped(program, stage, layout) for stage in program.stages)
        if shaped and len(views) != len(sizes):
            raise InternalError(f"{program.name} sees matrices: bind its {backend} kernel with a view of each tensor")
        self._views = views if shaped else ()
        self._flat = rows_of(sizes)
        #: As matrices in memory, where the program sees matrices.
        self.lying = lying(views, layout.transposed) if shaped else self._flat

    def seen(self, shaped: bool) -> Lying:
        """The tensors in memory for a stage: as matrices, or as single rows where it is not `shaped`."""
        return self.lying if shaped else self._flat

    def moving(self, stage: Stage, lines: Sequence[str]) -> list[Moving]:
        """The arguments of each call of a stage besides gradients. `lines` has the lines of the table of addresses."""
        names = moving_lines(self.program, stage)
        return [Moving(self.backend, name, lines.index(name), self._bytes(name)) for name in names]

    def _bytes(self, name: str) -> list[int]:
        return byte_counts(self.program, self.layout, name, self.sizes, self._views)
