"""A buffer of one tensor, read and written tile by tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rulec.arrays.library import Library
from rulec.language.node import Op


@dataclass(frozen=True)
class Tiled:
    """The matrices of a buffer, (batch, rows, cols).

    Where reading copies, `copying` makes the elements of a part, and `array` is in its stored dtype. Else `copying` is
    None, and `array` is the library's, in the same memory. `stays`, a truth on the device or None, prevents writes.
    """

    array: Any
    library: Library
    compute: str
    copying: Callable[[Any], Any] | None
    stays: Any = None

    def read(self, rows: slice, cols: slice) -> Any:
        """Some rows and columns in the compute dtype; the same memory where `copying` is None."""
        part = self.array[:, rows, cols]
        return part if self.copying is None else self.library.cast(self.copying(part), self.compute)

    def write(self, rows: slice, cols: slice, values: Any) -> None:
        """Writes some rows and columns, rounded to the stored dtype."""
        if self.stays is not None:
            values = self.library.arithmetic[Op.WHERE](self.stays, self.read(rows, cols), values)
        if self.copying is None:
            self.array[:, rows, cols] = values
        else:
            self.library.write(self.array[:, rows, cols], values)
