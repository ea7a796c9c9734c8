"""Prints a program as Triton source: the kernels of its stages, and the functions they call.

A stage that sees matrices is a loop over tiles, one below the other, and a kernel of its chunks. A tile has some rows,
and some neighbouring elements of each, of one matrix or several. Reductions to rows are written tile by tile, with a
slot for each row and column of tiles; reductions to columns chunk by chunk.
"""

from __future__ import annotations

from rulec.backend.printer import bare
from rulec.compiler.ir import Program, Result, Stage
from rulec.compiler.layout import Layout
from rulec.errors import BackendUnsupported
from rulec.kernel.place import COL, ELEMENT, MATRIX, ROW, TENSOR, is_shaped

from ..common.scalars import has_scalars
from .coded import CodedStage, coded_in
from .flat import FlatStage, chunk_lines
from .format_words import format_functions
from .plan import SHAPED, wide_arrays
from .scalars import ScalarSource
from .stage import StageSource, call, has_narrow, indented
from .words import file_text, words_used


def program_source(program: Program, layout: Layout, narrow: bool = False) -> str:
    """The whole file; BackendUnsupported for an operation without a word in Triton, and codes with rows.

    If `narrow`, gradients may lie at any address while other arrays move 16 bytes at a time.
    """
    stages = [
        "\n".join(lines)
        for index in range(len(program.stages))
        for lines in _stage_functions(program, layout, index, narrow)
    ]
    scalars = ["\n".join(ScalarSource(program).function())] if has_scalars(program) else []
    first = words_used("\n".join(stages))
    every = words_used("\n".join([*stages, *["finish("] * _reduces(program), *scalars]))
    formats = format_functions([form for _, form in layout.formats], "\n".join(stages))
    title = f"{program.name} by the triton backend: {layout.text()}. Printed by rulec."
    return file_text(program, title, [*first, *formats, *stages, *(w for w in every if w not in first), *scalars])


def _stage_functions(program: Program, layout: Layout, index: int, narrow: bool) -> list[list[str]]:
    """The functions of a stage; none for an empty stage."""
    stage = program.stages[index]
    if not stage.roots:
        return []
    printed = _kind(program, layout, stage)(program, layout, index)
    printed.narrow_gradient = narrow and has_narrow(program, stage, layout)
    return printed.functions()


def _kind(program: Program, layout: Layout, stage: Stage) -> type[FlatStage | ShapedStage]:
    if not is_shaped(program, stage, layout):
        return CodedStage if coded_in(program, stage, layout) else FlatStage
    if coded_in(program, stage, layout):
        raise BackendUnsupported("triton", "states in codes in a stage with rows and columns", program.name)
    return ShapedStage


def _reduces(program: Program) -> bool:
    return any(stage.reduces for stage in program.stages)


_TILE, _ROWS = "(MATRICES, ROWS, COLUMNS)", "(MATRICES, ROWS, 1)"
_SIZES, _CUT = ["batch", "height", "width"], ["lines", "across", "deep"]
_PLACES = [
    "plane = tl.arange(0, MATRICES)[:, None, None]",
    "down = tl.arange(0, ROWS)[None, :, None]",
    "along = tl.arange(0, COLUMNS)[None, None, :]",
    "rows = plane * height.to(tl.int32) + down",
    "columns = plane * width.to(tl.int32) + along",
    "beside = None if ALL else (plane < batch - matrix) & (along < width - left)",
]
_SHAPE = ["MATRICES", "ROWS", "COLUMNS"]


class ShapedStage(StageSource):
    """A stage over tiles of matrices."""

    elements = "MATRICES * ROWS * COLUMNS"
    works_on = True

    def functions(self) -> list[list[str]]:
        """The loop, a chunk of one shape of tiles, and the kernel, each as lines."""
        return [self._tiles(), self._chunk(), self._kernel()]

    def _reduced(self, *places: str) -> list[Result]:
        return [r for where in places for r in self.nest.totals(where)]

    def _row_slots(self) -> list[str]:
        return [self.at[r.name] for r in self._reduced(ROW)]

    def _arguments(self) -> list[str]:
        """The arguments of the loop, without its place and its constants."""
        slots = self._row_slots()
        arguments = [*(self.at[a] for a in self.arrays), *(["slots", *slots] if slots else []), *self.scalars]
        return arguments + ["scale"] * self.scaled + ["stays", "row"] * self.guarded

    # The loop over tiles

    def _tiles(self) -> list[str]:
        switches = [f"{s}: tl.constexpr" for s in ["ALL", *_SHAPE, *["VECTOR", *["EMULATED"] * self.emulates]]]
        arguments = ["matrix", "left", "top", "bottom", *_SIZES, *self._arguments(), *switches]
        totals = [self.total(r, self.names[r.name], "1") for r in self._reduced(COL)]
        totals += [self.total(r, self.names[r.name]) for r in self._reduced(TENSOR)]
        body = [
            f'"""Rows `top` to `bottom` of a column of tiles, in {self.compute}: ALL of each tile, 16 bytes at a time,',
            "or those of its elements that are in the matrix, at any address.", '"""',
            *self.pointer_lines(), *self.before_lines(),
            "if ALL:", "    width = width // VECTOR * VECTOR",
            *_PLACES,
            "i = rows * width.to(tl.int32) + along",
            *self.vector_lines(MATRIX, "matrix + plane", "None if ALL else plane < batch - matrix"),
            *self.vector_lines(COL, "matrix * width + left + columns", "beside"),
            *(f"{at} = slots + {at} + left // COLUMNS * batch * height" for at in self._row_slots()),
            *(self.zero(r, _TILE) for r in self._reduced(COL)), *(self.zero(r, _ROWS) for r in self._reduced(TENSOR)),
            "for first in range(top, bottom, ROWS):", *indented(self._tile()),
            *[f"return {', '.join(totals)}"] * bool(totals),
        ]  # fmt: skip
        return ["@triton.jit", *call(f"def stage_{self.index}_tiles", arguments, ":"), *indented(body)]

    def _tile(self) -> list[str]:
        """The statements for a tile."""
        # No tile begins below the height. The minimum keeps LLVM from a running address in registers for each element
        # under a mask: it computes addresses where they are used.
        return [
            "line = matrix * height + (first if ALL else tl.minimum(first, height))",
            "start = line * width + left",
            "below = None if ALL else (plane < batch - matrix) & (down < bottom - first)",
            "inside = None if ALL else beside & below",
            *self.vector_lines(ROW, "line + rows", "below"),
            *self.load_lines(), *self.vector_lines(ELEMENT, "start + i", "inside"), *self.value_lines(),
            *self.store_lines(), *(self._row_line(r) for r in self._reduced(ROW)),
            *(self.taken_in(r, _TILE) for r in self._reduced(COL)), *map(self._rows_line, self._reduced(TENSOR)),
        ]  # fmt: skip

    def _row_line(self, reduction: Result) -> str:
        """The statement that stores the reductions of a tile's rows."""
        rows = bare(self.total(reduction, self.operand(reduction, _TILE), "2"))
        return f"tl.store({self.at[reduction.name]} + line + rows, {rows}, mask=below)"

    def _rows_line(self, reduction: Result) -> str:
        """The statement that joins a tile to a reduction of the tensor, row by row to save registers."""
        if reduction.name in self.in_packs:
            return self.taken_in(reduction, _TILE)
        name, rows = self.names[reduction.name], self.total(reduction, self.operand(reduction, _TILE), "2")
        return f"{name} = {bare(self.joined(reduction, name, rows))}"

    # A chunk, and the kernel

    def _chunk(self) -> list[str]:
        switches = [f"{s}: tl.constexpr" for s in [*_SHAPE, "WIDE", "VECTOR", *["EMULATED"] * self.emulates]]
        arguments = ["number", *_SIZES, *_CUT, *self._slot_arguments(), *self._arguments(), *switches]
        wide = wide_arrays(self.program, self.stage, self.layout)
        body = [
            '"""One chunk of a tensor that is cut into tiles of this shape; WIDE ones are taken 16 bytes at a time."""',
            "left, piece, matrix = number % across, number // across % deep, number // (across * deep)",
            "left, matrix = left.to(tl.int64) * COLUMNS, matrix.to(tl.int64) * MATRICES",
            "top = piece.to(tl.int64) * lines",
            "bottom = tl.minimum(top + lines, height)",
            f"aligned = ({self.aligned(wide)}) & (width % VECTOR == 0)",
            "whole = aligned & (left + COLUMNS <= width) & (matrix + MATRICES <= batch)",
            "middle = tl.where(whole, top + (bottom - top) // ROWS * ROWS, top) if WIDE else top",
            *self._call_lines("middle", "bottom", "False", self.rest),
            "if WIDE:", *indented(self._call_lines("top", "middle", "True", self.names)),
            *(self._joined_line(r) for r in self._reduced(COL, TENSOR)), *self._slot_lines(),
        ]  # fmt: skip
        return ["@triton.jit", *call(f"def stage_{self.index}_chunk", arguments, ":"), *indented(body)]

    def _slot_arguments(self) -> list[str]:
        """The arguments of a chunk for its slots, without those of the loop."""
        kept = self._reduced(COL, TENSOR)
        return ["known"] * bool(kept) + ["slots"] * (bool(kept) and not self._reduced(ROW))

    def _call_lines(self, top: str, bottom: str, everything: str, names: dict[str, str]) -> list[str]:
        # A masked access keeps an address for each element in registers, so these tiles are smaller.
        rows = "ROWS" if everything == "True" else "ROWS // 2 if VECTOR == 8 and ROWS > 1 else ROWS"
        shape = ["MATRICES", rows, "COLUMNS"]
        last = [everything, *shape, "VECTOR", *["EMULATED"] * self.emulates]
        arguments = ["matrix", "left", top, bottom, *_SIZES, *self._arguments(), *last]
        results = ", ".join(names[r.name] for r in self._reduced(COL, TENSOR))
        return call(f"{results} = stage_{self.index}_tiles" if results else f"stage_{self.index}_tiles", arguments)

    def _joined_line(self, reduction: Result) -> str:
        """The statement that joins the reductions of whole tiles, if any, and of the others."""
        name, rest = self.names[reduction.name], self.rest[reduction.name]
        return f"{name} = {self.joined(reduction, name, rest)} if WIDE else {rest}"

    def _slot_lines(self) -> list[str]:
        """The statements that store the reductions of a chunk's columns and of the whole chunk."""
        lines = []
        if self._reduced(COL):
            lines += [
                "plane, along = tl.arange(0, MATRICES)[:, None, None], tl.arange(0, COLUMNS)[None, None, :]",
                "beside = (plane < batch - matrix) & (along < width - left)",
                "column = piece * batch * width + matrix * width + left + plane * width.to(tl.int32) + along",
            ]
        for r in self._reduced(COL):
            slot = f"slots + {self.slots(r)} + column"
            lines.append(f"tl.store({slot}, {self.names[r.name]}, mask=beside)")
        lines += [
            f"tl.store(slots + {self.slots(r)} + number, {self.names[r.name]})" for r in self._reduced(TENSOR)
        ]  # fmt: skip
        return lines

    def _kernel(self) -> list[str]:
        reduced = bool(self.stage.reduces)
        tables = ["chunks", "known", "moving", "table", "stays", "scale", *["slots"] * reduced]
        switches = [f"{s}: tl.constexpr" for s in ["BLOCK", "VECTOR", *["EMULATED"] * self.emulates]]
        names = ", ".join(f'"{t}"' for t in tables)
        sizes = ", ".join(SHAPED[:3])
        loads = ", ".join(f"tl.load(known + {i})" for i in range(3))
        body = [
            *self.about_lines(),
            *chunk_lines(self), f"{sizes} = {loads}", "lines, tile = tl.load(known + 3), tl.load(known + 6)",
            "across, deep = tl.load(known + 4).to(tl.int32), tl.load(known + 5).to(tl.int32)",
            *self.address_lines(), *self.scalar_lines(), *self._tile_lines(),
        ]  # fmt: skip
        return [
            f"@triton.jit(do_not_specialize=[{names}])",
            *call(f"def stage_{self.index}", [*tables, *switches], ":"),
            *indented(body),
        ]

    def _tile_lines(self) -> list[str]:
        """The chunk, by the shape of the tensor's tiles."""
        shapes = [
            ["1", "1", "BLOCK", "True"], ["1", "BLOCK // (32 * VECTOR)", "32 * VECTOR", "True"],
            ["1", "BLOCK // 8", "8", "False"], ["BLOCK // 64", "8", "8", "False"],
        ]  # fmt: skip
        lines = []
        for tile, shape in enumerate(shapes):
            last = [*shape, "VECTOR", *["EMULATED"] * self.emulates]
            arguments = ["number", *_SIZES, *_CUT, *self._slot_arguments(), *self._arguments(), *last]
            test = f"{'el' * bool(tile)}if tile == {tile}:" if tile < len(shapes) - 1 else "else:"
            lines += [test, *indented(call(f"stage_{self.index}_chunk", arguments))]
        return lines
