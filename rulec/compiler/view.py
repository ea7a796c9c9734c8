"""The view of a tensor of any shape as a batch of matrices, and its shape facts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rulec.language.expr.node import extent


@dataclass(frozen=True)
class MatrixView:
    """A tensor's shape, and its `batch x rows x cols` in row and column reductions and in `@`.

    By default the last two dimensions are the matrix and the others the batch; a vector is one row.
    `flatten: rest` joins all but the first dimension into columns; `short: first` transposes tall matrices. Of a part
    of a tensor, `whole` is the view of the whole one, which the shape facts are of.

    For rules with axes or blocks, `letters` has the axis of each dimension, and `segments` the extents of the axes that
    the batch consists of, where it has several. With `blocks` the rows are blocks of consecutive elements.
    """

    shape: tuple[int, ...]
    batch: int
    rows: int
    cols: int
    transposed: bool = False
    whole: MatrixView | None = None
    letters: str = ""
    segments: tuple[int, ...] = ()
    blocks: bool = False

    @cached_property
    def facts(self) -> dict[str, float]:
        """The shape facts of the rule language. `machine_eps` is not among them: it belongs to the dtype."""
        if self.whole is not None:
            return self.whole.facts
        return {
            **plain_facts(self.shape), "rows": self.rows, "cols": self.cols,
            **{f"part{k}": n for k, n in enumerate(self.segments)},
        }  # fmt: skip

    @property
    def work(self) -> float:
        """The multiplications of one iteration of `newton_schulz`: the Gram matrix, its square, and the next matrix."""
        short, long = sorted((self.rows, self.cols))
        return float(self.batch) * (2.0 * short * short * long + float(short) ** 3)

    def axis(self, dimension: int) -> str:
        """The axis of the matrices that a dimension of the tensor is, or is joined into: b, i or j."""
        if self.letters:
            return self.letters[dimension]
        rows, cols = (self.whole or self).axes
        return "i" if dimension in rows else "j" if dimension in cols else "b"

    @property
    def axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of the tensor in its rows, and the axes in its columns."""
        count = len(self.shape)
        if self.blocks:
            return (0,), (1,)  # of the blocks
        if self.letters:
            return tuple(tuple(d for d in range(count) if self.letters[d] == letter) for letter in "ij")  # type: ignore[return-value]
        rows: tuple[int, ...] = ()
        cols: tuple[int, ...] = tuple(range(count))
        if count >= 2 and {self.rows, self.cols} == {*self.shape[-2:]} and self.batch == math.prod(self.shape[:-2]):
            rows, cols = (count - 2,), (count - 1,)
        elif count >= 2:
            rows, cols = (0,), cols[1:]
        return (cols, rows) if self.transposed else (rows, cols)

    def matrices(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The array of the tensor's shape as `batch x rows x cols`."""
        if self.transposed:
            return array.reshape(self.batch, self.cols, self.rows).swapaxes(1, 2)
        return array.reshape(self.batch, self.rows, self.cols)

    def kept_shape(self, rows: int, cols: int, letters: str = "bij") -> tuple[int, ...]:
        """The shape of a kept array of `batch x rows x cols`: the tensor's, with these rows and columns at its end.

        With axes, it is the tensor's with 1 for each axis that is not in `letters`; with blocks, it is a vector.
        """
        if self.blocks:
            return (rows,)
        if self.letters:
            return tuple(n if c in letters else 1 for n, c in zip(self.shape, self.letters, strict=True))
        of = self.whole or self
        return (*self.shape[:-2], rows, cols) if math.prod(of.shape[:-2]) == of.batch else (rows, cols)

    def kept(self, array: Any, letters: str) -> Any:
        """A kept array as `batch x rows x cols`, with 1 for each axis that is not in `letters`."""
        return array.reshape(self.kept_extents(tuple(array.shape), letters))

    def kept_extents(self, shape: tuple[int, ...], letters: str) -> tuple[int, int, int]:
        """The matrices, rows and columns of a kept array of this shape."""
        if not (self.blocks or self.letters):
            return self.batch, shape[-2], shape[-1]
        part = next((n for k, n in enumerate(self.segments) if str(k) in letters), 1)
        batch = self.batch if "b" in letters else part
        return batch, self.rows if "i" in letters else 1, self.cols if "j" in letters else 1

    def tensor(self, matrices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The inverse of `matrices`."""
        return (matrices.swapaxes(1, 2) if self.transposed else matrices).reshape(self.shape)


def plain_facts(shape: Sequence[int]) -> dict[str, float]:
    """The shape facts that do not depend on a rule's view: dimensions, elements, and the extent of each dimension."""
    return {"ndim": len(shape), "numel": math.prod(shape), **{extent(d): n for d, n in enumerate(shape)}}


def matrix_view(
    shape: Sequence[int], view: Mapping[str, str] | None = None, whole: Sequence[int] | None = None
) -> MatrixView:  # fmt: skip
    """The view of a tensor of this shape under a rule's `view`, or of a part of a tensor of the shape `whole`."""
    shape, view = tuple(shape), view or {}
    of_whole = None if whole is None else matrix_view(whole, view)
    if len(shape) < 2:
        batch, rows, cols = 1, 1, math.prod(shape)
    elif view.get("flatten") == "rest":
        batch, rows, cols = 1, shape[0], math.prod(shape[1:])
    else:
        batch, rows, cols = math.prod(shape[:-2]), shape[-2], shape[-1]
    tall = rows > cols if of_whole is None else of_whole.transposed
    if view.get("short") == "first" and tall:
        return MatrixView(shape, batch, cols, rows, transposed=True, whole=of_whole)
    return MatrixView(shape, batch, rows, cols, whole=of_whole)
