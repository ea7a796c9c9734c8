"""A buffer of one tensor, of which tiles are read and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rulec.arrays.library import Library
from rulec.language.node import Op


@dataclass(frozen=True)
class Tiled:
    """The matrices of a buffer, (batch, rows, cols).

    Where they are read by copying, `copying` makes the elements of a part, and `array` is as it is stored; else `array`
    is as the library works on it, in the same memory. `stays` says, if it is not None, whether nothing is written.
    """

    array: Any
    library: Library
    compute: str
    copying: Callable[[Any], Any] | None
    stays: Any = None

    def read(self, rows: slice, cols: slice) -> Any:
        """Some rows and columns in the dtype of arithmetic: of what is not copied, the same memory."""
        part = self.array[:, rows, cols]
        return part if self.copying is None else self.library.cast(self.copying(part), self.compute)

    def write(self, rows: slice, cols: slice, values: Any) -> None:
        """Gives some rows and columns their new values, rounded to the dtype that they are stored in."""
        if self.stays is not None:
            values = self.library.arithmetic[Op.WHERE](self.stays, self.read(rows, cols), values)
        if self.copying is None:
            self.array[:, rows, cols] = values
        else:
            self.library.write(self.array[:, rows, cols], values)
