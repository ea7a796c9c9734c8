"""Stacks of small matrices in memory that stays from step to step: a buffer of all sets is read in one call.

Without it each set is a call of its own, which makes the stack in new memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rulec.array_api.library import Library

#: Most elements of a buffer's stacks that stay: 8 MiB of float32. For larger matrices a call is short beside its work.
KEPT = 1 << 21


@dataclass(frozen=True)
class StackShape:
    """The stack of a set: `count` tensors of shape `stored`, as `(count * batch, rows, cols)`.

    If `turned`, matrices are stored by columns.
    """

    count: int
    stored: tuple[int, ...]
    rows: int
    cols: int
    turned: bool

    @property
    def size(self) -> int:
        """The elements of the stack."""
        return self.count * math.prod(self.stored)


class KeptStacks:
    """The stacks of a buffer, by the number of their set, and views of them for each tensor.

    `stacks` has the matrices, and `transposed` their transposes in the same memory.
    """

    def __init__(self, shapes: Mapping[int, StackShape], dtype: str, library: Library) -> None:
        self._library = library
        self.stacks: dict[int, Any] = {}
        self.transposed: dict[int, Any] = {}
        self._parts: list[Any] = []
        for k, shape in shapes.items():
            memory = library.cast(library.empty(shape.size), dtype)
            rows, cols = (shape.cols, shape.rows) if shape.turned else (shape.rows, shape.cols)
            by_rows = memory.reshape(-1, rows, cols)
            views = by_rows, by_rows.swapaxes(1, 2)
            self.stacks[k], self.transposed[k] = reversed(views) if shape.turned else views
            parts = library.cut(memory, [math.prod(shape.stored)] * shape.count)
            self._parts += [part.reshape(shape.stored) for part in parts]

    def read(self, arrays: Sequence[Any]) -> KeptStacks:
        """Copies the stored arrays of all tensors into the stacks, rounded to their dtype."""
        self._library.hold(self)
        self._library.copy_all(self._parts, arrays)
        return self
