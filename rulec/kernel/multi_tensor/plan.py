"""The chunk tables of kernels in main memory. The printed source and its caller both take their columns from here."""

from __future__ import annotations

from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.kernel.place import is_shaped

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
