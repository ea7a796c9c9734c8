"""What the printed kernels of the triton backend and the code that calls them agree on.

A program of the grid takes a chunk, a line (tensor, which of its chunks) of the table `chunks`. Two tables have a line
for each tensor: `known` is filled when tensors are bound, `moving` with each call. Their columns are named here.
"""

from __future__ import annotations

from rulec.compiler.ir import Program, Stage
from rulec.compiler.layout import ITEM_SIZE, Layout
from rulec.kernel.nest import Nest
from rulec.kernel.place import COL, ELEMENT, is_shaped, moving_lines, used_buffers
from rulec.language.node import Op, walk

#: Columns of `known` in a stage that sees elements alike: how many there are, and the blocks in a chunk.
FLAT = ("size", "span")

#: Columns of `known` in a stage that sees matrices, as they lie in memory: how many there are, their rows, the elements
#: in a row; the rows of a chunk, how many chunks lie side by side and one below the other in a matrix; and which tile
#: they are cut into (see `tile_shapes`).
SHAPED = ("batch", "height", "width", "lines", "across", "deep", "tile")

#: Rows of a result that one program of the finishing kernel makes; lanes that a whole tensor's is made with.
FINISHED = 256


def moving_columns(program: Program, stage: Stage) -> list[str]:
    """The columns of `moving` after the first, the tensor's row of the scalar table: addresses."""
    return [b for b in used_buffers(program, stage) if b == "g"] + moving_lines(program, stage)


def known_columns(program: Program, stage: Stage, layout: Layout) -> list[str]:
    """The columns of `known`: the shape and how it is cut, where the slots of reductions begin, and addresses."""
    moving = moving_columns(program, stage)
    shape = SHAPED if is_shaped(program, stage, layout) else FLAT
    fixed = [b for b in used_buffers(program, stage) if b not in moving]
    return [*shape, *(r.name for r in stage.reduces), *fixed]


def wide_arrays(program: Program, stage: Stage, layout: Layout) -> list[str]:
    """What a stage reads or writes in many elements side by side: they must be aligned for 16 bytes at a time."""
    nest = Nest(program, layout, stage)
    return [*nest.buffers, *(v.name for v in nest.read(ELEMENT, COL))]


def item_sizes(program: Program, stage: Stage, layout: Layout) -> list[int]:
    """The bytes of an element of each of these."""
    return [
        ITEM_SIZE[layout.compute if a in stage.reads else layout.dtype(a)] for a in wide_arrays(program, stage, layout)
    ]


def moved(program: Program, stage: Stage, layout: Layout) -> tuple[int, int]:
    """The bytes that one element's update reads and writes in a stage: values of rows and columns are few beside it."""
    loads = {str(n.arg) for n in walk(stage.roots) if n.op is Op.LOAD}
    read = sum(ITEM_SIZE[layout.dtype(b)] for b in loads)
    read += ITEM_SIZE[layout.compute] * len(Nest(program, layout, stage).read(ELEMENT))
    return read, sum(ITEM_SIZE[layout.dtype(s.buffer)] for s in stage.stores)


def vector_width(program: Program, stage: Stage, layout: Layout) -> int:
    """How many elements of the narrowest array of a stage are 16 bytes."""
    return 16 // min(item_sizes(program, stage, layout), default=4)


def tile_shapes(block: int, vector: int) -> tuple[tuple[int, int, int], ...]:
    """The tiles of so many elements that matrices may be cut into: matrices, rows, and elements of a row.

    For a single row; for most; for narrow matrices, and for small ones.
    """
    width = 32 * vector
    return (1, 1, block), (1, block // width, width), (1, block // 8, 8), (block // 64, 8, 8)
