"""How the tensors of a bucket are cut into chunks, the units of a kernel's work.

A chunk lies in one tensor, and follows from that tensor's shape alone: so the bits of a result depend neither on the
other tensors nor on who runs which chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rulec.compiler.view import MatrixView
from rulec.kernel.moving import in_memory

Whole = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Lying:
    """Tensors as they lie in memory: `batch` matrices of `height` rows, `width` neighbouring elements each.

    Each is a vector of one number for every tensor.
    """

    batch: Whole
    height: Whole
    width: Whole

    @property
    def size(self) -> Whole:
        """Their elements."""
        return self.batch * self.height * self.width

    @property
    def on_end(self) -> Lying:
        """The same with the rows of all matrices of a tensor in one."""
        return Lying(np.ones_like(self.batch), self.batch * self.height, self.width)


def rows_of(sizes: Sequence[int]) -> Lying:
    """Tensors of so many elements, each a single row."""
    width = np.asarray(sizes, np.int64)
    return Lying(np.ones_like(width), np.ones_like(width), width)


def lying(views: Sequence[MatrixView], transposed: bool) -> Lying:
    """Tensors as the matrices that the rule sees; InternalError where a view is not of this layout."""
    return Lying(*np.array([in_memory(view, transposed) for view in views], np.int64).reshape(-1, 3).T)


class Cut:
    """Tensors in chunks of so many `matrices`, of `lines` rows and `wide` columns of each: a vector of each number.

    In a tensor, those side by side come first, then those one below the other, then other matrices. There are `across`
    side by side and `deep` one below the other in a matrix, `counts` in a tensor. Chunk 0 of tensor i is chunk
    `first[i]` of all.
    """

    def __init__(self, tensors: Lying, matrices: Any, lines: Any, wide: Any) -> None:
        self.tensors, self.matrices, self.lines, self.wide = tensors, *(
            np.broadcast_to(np.asarray(x, np.int64), tensors.width.shape) for x in (matrices, lines, wide)
        )  # fmt: skip
        self.across, self.deep = parts(tensors.width, self.wide), parts(tensors.height, self.lines)
        self.counts = self.across * self.deep * parts(tensors.batch, self.matrices)
        self.first = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts)])

    def numbered(self, tensors: Sequence[int] | Whole) -> tuple[Whole, Whole]:
        """For every chunk of these tensors, in their order: its tensor, and which of its chunks it is."""
        chosen = np.asarray(tensors, np.int64)
        place, number = counted(self.counts[chosen])
        return chosen[place], number

    @cached_property
    def words(self) -> dict[str, Whole]:
        """What is known of every chunk, by name.

        It has the matrices `first` to `last`, the rows `top` to `bottom` and the columns `left` to `right` of each.
        Among all it is number `slot`, and among the slots of its tensor those of its rows and columns begin at
        `row_slots` and `col_slots`.
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

    def table(self, columns: Sequence[str], **own: Whole) -> Whole:
        """A row of these `words` for every chunk, or of its `own`; columns of names that are none of them are zero."""
        found, words = np.zeros((int(self.first[-1]), len(columns)), np.int64), {**self.words, **own}
        for column, name in enumerate(columns):
            if name in words:
                found[:, column] = words[name]
        return found

    def rows(self, tensors: Sequence[int] | Whole) -> Whole:
        """The rows of such a table that are those of these tensors."""
        tensor, number = self.numbered(tensors)
        return self.first[tensor] + number


def counted(counts: Whole) -> tuple[Whole, Whole]:
    """So many of each, one after the other: which it is one of, and its number among those."""
    before = np.cumsum(counts) - counts
    return np.repeat(np.arange(len(counts)), counts), np.arange(int(counts.sum())) - np.repeat(before, counts)


def parts(length: Whole, part: Whole | int) -> Whole:
    """How many parts of a length there are, the last of which may be shorter."""
    count: Whole = -(-length // np.maximum(part, 1))
    return count
