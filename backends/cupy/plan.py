"""The agreement between printed CUDA C and its launches: names of kernels, words of their tables, widths."""

from __future__ import annotations

from rulec.compiler.ir import Program, Stage
from rulec.compiler.layout import ITEM_SIZE, Layout, kernel_buffers
from rulec.kernel.nest import Nest
from rulec.kernel.place import COL, ELEMENT

#: Threads in a block, at most; always a multiple of 32.
THREADS = 256
#: Bytes that a thread moves at once.
PACK = 16

#: The words of a block in a stage without rows and columns: elements `start` to `stop` of one tensor, and the `slot`
#: for reductions of the tensor.
CHUNK = ("tensor", "start", "stop", "slot")

#: The words of a block in a stage that sees matrices: the columns `left` to `right` in the lines `top` to `bottom`.
#: Lines are rows in memory, of all matrices of one tensor, one after the other. `lanes` threads, a power of two and at
#: most 32, share a line. `row_slots` and `col_slots` are the places of its first slots of rows and columns.
TILE = (
    "tensor", "matrix", "width", "top", "bottom", "left", "right", "lanes", "row_slots", "col_slots", "slot",
)  # fmt: skip

#: The words of a tensor in each call, before its addresses: its row in the scalar table, and the truth that all its
#: addresses, and all lines, begin at multiples of 16 bytes.
GIVEN = ("row", "wide")

#: The words of a block of `finish`: it joins `count` neighbouring totals from each of `terms` lines, `stride` apart.
FINISH = ("source", "target", "count", "stride", "terms", "kind")


def bound_lines(program: Program) -> list[str]:
    """The arrays of a tensor with the same address at every call: parameter, states, and slots of reductions."""
    kept = [b.name for b in kernel_buffers(program) if b.role in ("param", "state")]
    return kept + [r.name for stage in program.stages for r in stage.reduces]


def given_lines(program: Program) -> list[str]:
    """The arrays of a tensor that come with each call: its gradient, scratch buffers, inputs and vectors."""
    moving = [b.name for b in kernel_buffers(program) if b.role not in ("param", "state")]
    return moving + [v.name for v in program.vectors]


def pack_width(program: Program, layout: Layout, stage: Stage) -> int:
    """The neighbouring elements that a thread takes at once: 16 bytes of the narrowest array."""
    nest = Nest(program, layout, stage)
    sizes = [ITEM_SIZE[layout.dtype(name)] for name in nest.buffers]
    if nest.read(ELEMENT, COL):
        sizes.append(ITEM_SIZE[layout.compute])
    return PACK // min(sizes, default=ITEM_SIZE[layout.compute])


def kernel_name(program: Program, index: int) -> str:
    """The name of a stage's kernel."""
    return "step" if len(program.stages) == 1 else f"stage_{index}"
