"""The chunk tables of kernels in main memory: what the printed source and the code that calls it agree on."""

from __future__ import annotations

from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.kernel.place import is_shaped

#: Columns of a chunk's row where elements are alike, as `Cut.words` names them: neighbouring elements of one tensor.
FLAT_COLUMNS = ("tensor", "left", "right")

#: Columns of a chunk's row in the chunk table of a program that sees matrices. `first` and `last` are the range of
#: elements in a stage that sees none, else that of the tensor's matrices; rows and columns are those in memory.
CHUNK_COLUMNS = (
    "tensor", "first", "last", "height", "width", "top", "bottom", "left", "right", "row_slots", "col_slots",
)  # fmt: skip


def chunk_columns(program: Program, layout: Layout) -> int:
    """How many columns a program's chunk tables have."""
    shaped = any(is_shaped(program, stage, layout) for stage in program.stages)
    return len(CHUNK_COLUMNS if shaped else FLAT_COLUMNS)
