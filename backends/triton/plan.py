"""The agreement between the printed kernels of the triton backend and the code that calls them.

A program of the grid takes a chunk: a line (tensor, number of the chunk) of the table `chunks`. Two tables have a line
for each tensor: `known` is filled when tensors are bound, `moving` with each call. Their columns are named here.
"""

from __future__ import annotations

from rulec.compiler.ir import Program, Stage
from rulec.compiler.layout import ITEM_SIZE, Layout
from rulec.kernel.nest import Nest
from rulec.kernel.place import COL, ELEMENT, is_shaped, moving_lines, used_buffers
from rulec.language.expr.node import Op, walk

#: Columns of `known` in a stage without rows and columns: the number of elements, and the blocks in a chunk.
FLAT = ("size", "span")

#: Columns of `known` in a stage that sees matrices, as they lie in memory: the number of matrices, their rows, the
#: elements in a row; the rows of a chunk, the number of chunks side by side and one below the other in a matrix; and
#: the index of their tile in `tile_shapes`.
SHAPED = ("batch", "height", "width", "lines", "across", "deep", "tile")

#: The results of one program of the finishing kernel side by side; its lanes for the one result of a whole tensor.
FINISHED = 256


def moving_columns(program: Program, stage: Stage) -> list[str]:
    """The columns of `moving` after the first, the tensor's row of the scalar table: addresses."""
    return [b for b in used_buffers(program, stage) if b == "g"] + moving_lines(program, stage)


def known_columns(program: Program, stage: Stage, layout: Layout) -> list[str]:
    """The columns of `known`: the shape and its cut, the first slots of reductions, and addresses."""
    moving = moving_columns(program, stage)
    shape = SHAPED if is_shaped(program, stage, layout) else FLAT
    fixed = [b for b in used_buffers(program, stage) if b not in moving]
    return [*shape, *(r.name for r in stage.reduces), *fixed]


def wide_arrays(program: Program, stage: Stage, layout: Layout) -> list[str]:
    """The arrays that a stage reads or writes in neighbouring elements: aligned, they move 16 bytes at a time."""
    nest = Nest(program, layout, stage)
    return [*nest.buffers, *(v.name for v in nest.read(ELEMENT, COL))]


def item_sizes(program: Program, stage: Stage, layout: Layout) -> list[int]:
    """The bytes of an element, for each of `wide_arrays`."""
    return [
        ITEM_SIZE[layout.compute if a in stage.reads else layout.dtype(a)] for a in wide_arrays(program, stage, layout)
    ]


def moved(program: Program, stage: Stage, layout: Layout) -> tuple[int, int]:
    """The bytes read and written in a stage for one element, without the few values of rows and columns."""
    loads = {str(n.arg) for n in walk(stage.roots) if n.op is Op.LOAD}
    read = sum(ITEM_SIZE[layout.dtype(b)] for b in loads)
    read += ITEM_SIZE[layout.compute] * len(Nest(program, layout, stage).read(ELEMENT))
    return read, sum(ITEM_SIZE[layout.dtype(s.buffer)] for s in stage.stores)


def vector_width(program: Program, stage: Stage, layout: Layout) -> int:
    """The elements in 16 bytes of the narrowest array of a stage."""
    return 16 // min(item_sizes(program, stage, layout), default=4)


def tile_shapes(block: int, vector: int) -> tuple[tuple[int, int, int], ...]:
    """The tiles of `block` elements for cutting matrices: (matrices, rows, elements of a row).

    The first is for a single row, the second for most matrices, the third for narrow ones, the fourth for small ones.
    """
    width = 32 * vector
    return (1, 1, block), (1, block // width, width), (1, block // 8, 8), (block // 64, 8, 8)
