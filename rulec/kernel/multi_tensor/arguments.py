"""The arguments of each call of a stage besides gradients: scratch, inputs and vectors; and matrices in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rulec.array_api.slices import Together
from rulec.compiler.ir import Program
from rulec.compiler.layout import ITEM_SIZE, Layout
from rulec.compiler.view import MatrixView
from rulec.errors import InternalError


@dataclass(frozen=True)
class Moving:
    """A scratch buffer, input or vector: its line in the table of addresses, and the bytes of each tensor's array."""

    backend: str
    name: str
    line: int
    sizes: Sequence[int]

    def take(self, scratch: Mapping[str, Sequence[Any]], fired: Sequence[int]) -> Sequence[Any]:
        """The arrays of these tensors; InternalError where they are missing or of another size."""
        arrays = scratch.get(self.name, ())
        if isinstance(arrays, Together) and np.array_equal(arrays.byte_counts, self._bytes[list(fired)]):
            return arrays
        if [x.nbytes for x in arrays] != [self.sizes[i] for i in fired]:
            actual = f"{len(arrays)} arrays of {[x.nbytes for x in arrays][:5]} bytes"
            raise InternalError(
                f"the {self.backend} kernel needs {self.name!r} for {len(fired)} tensors and was given {actual}"
            )
        return arrays

    @cached_property
    def _bytes(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array(self.sizes, np.int64)


def byte_counts(
    program: Program, layout: Layout, name: str, sizes: Sequence[int], views: Sequence[MatrixView]
) -> list[int]:
    """The bytes of each tensor's array of a buffer or vector. `sizes` are the elements of the tensors."""
    vector = next((v for v in program.vectors if v.name == name), None)
    if vector is None:
        return [ITEM_SIZE[layout.dtype(name)] * size for size in sizes]
    letters, item = set(vector.axes.letters), ITEM_SIZE[layout.result(name)]
    if {"i", "j"} <= letters:
        return [item * size for size in sizes]
    return [item * v.batch * (v.rows if "i" in letters else 1) * (v.cols if "j" in letters else 1) for v in views]


def in_memory(view: MatrixView, transposed: bool) -> tuple[int, int, int]:
    """The number of matrices of a tensor, of their rows in memory, and of the neighbouring elements of a row."""
    if view.transposed != transposed:
        raise InternalError(f"a tensor of shape {view.shape} is not seen as its bucket's layout says")
    return (view.batch, view.cols, view.rows) if transposed else (view.batch, view.rows, view.cols)
