"""Prints one stage of a program as a C function of one chunk, or one tile, of a tensor."""

from __future__ import annotations

from types import MappingProxyType

from rulec.compiler.ir import Result
from rulec.kernel.nest import Level, written
from rulec.kernel.place import COL, ELEMENT, MATRIX, ROW, TENSOR
from rulec.kernel.quantized import coded_buffers
from rulec.language.expr.node import Op
from rulec.standalone.cases import Version

from ...cstyle.element import NOTHING, ElementWriter, Parameter
from ...cstyle.loops import ChunkLoops
from .standalone_text import block, loop, signature
from .standalone_words import C99

#: The range of a stage's function: a chunk of a tensor, or a tile of its matrices.
_FLAT = ("int64_t start", "int64_t stop")
_TILED = ("int64_t matrix", "int64_t top", "int64_t bottom", "int64_t left", "int64_t right", "int64_t height",
          "int64_t width")  # fmt: skip


class _Inline(ElementWriter):
    """The text of an element inside the loops, with totals in variables, and totals of columns in slots."""

    def _total(self, reduction: Result) -> str:
        in_column = self.nest.place(reduction) == COL
        return f"{self.at[reduction.name]}[column]" if in_column else self.names[reduction.name]


class StageText(ChunkLoops):
    """One stage of a version as a function `name` of pointers and a tile of one matrix, or a chunk."""

    dialect, writer = C99, _Inline
    slots = MappingProxyType({ROW: "line", MATRIX: "0", TENSOR: "0"})

    def __init__(self, version: Version, index: int, name: str) -> None:
        super().__init__(version.program, version.layout, index, name)
        #: The states in codes: the function gets their values.
        self.coded = coded_buffers(version.layout, self.write.printer.loads(), self.nest.stored)

    @property
    def _far(self) -> bool:
        """Whether the function is told the place in its tensor of element 0, as its values are those of a chunk."""
        return self.write.placed and bool(self.coded) and not self.nest.shaped

    def chunk(self) -> list[str]:
        """The arguments before those in `passed`, for a chunk of a tensor from `start` to `stop`."""
        return ["0", "some", *["start"] * self._far] if self.coded else ["start", "stop"]

    def passed(self) -> list[Parameter]:
        """The parameters of the function after its range: buffers, vectors, scalars, and slots of reductions."""
        return [p for p in self.write.parameters() if p.kind not in ("index", "position")]

    def _declared(self, parameter: Parameter) -> str:
        """The declaration of a parameter. Vectors of rows, columns and matrices are arrays of doubles."""
        if parameter.kind == "scalar":
            return parameter.declaration
        if parameter.kind == "buffer" or parameter.place == ELEMENT:
            return f"{parameter.type}restrict {parameter.name}"
        return f"{'const ' * (parameter.kind == 'vector')}double *restrict {self.write.at[parameter.of]}"

    def text(self) -> str:
        """The printed function."""
        first = ["int64_t first"] * self._far
        declared = [*(_TILED if self.nest.shaped else _FLAT), *first, *map(self._declared, self.passed())]
        lines = written(self.nest.levels_of_one_matrix(), self)
        return "\n".join([*signature(f"static void {self.name}", declared), *block(lines)]) + "\n"

    # Loops: a tile lies in one matrix

    def _row_lines(self) -> list[str]:
        return ["const int64_t line = matrix * height + k;"]

    def loop(self, level: Level, body: list[str]) -> list[str]:
        """A loop over the rows of a tile, or the elements of a row or a chunk."""
        if level.place == ROW:
            return loop("k", "top", "bottom", body)
        ends = ("j", "left", "right") if self.nest.shaped else ("i", "start", "stop")
        origin = "line * width + left" if self.nest.shaped else "first" if self._far else "start"
        origins = [f"const int64_t origin = {origin};"] * self.write.placed
        return [*origins, *self._simd(), *loop(*ends, body)]

    def element(self) -> list[str]:
        """The statements for one element."""
        position = ["const int64_t position = first + i;" if self._far else "const int64_t position = i;"]
        position *= self.write.placed
        if not self.nest.shaped:
            return [*position, *self.write.body()]
        column = ["const int64_t column = matrix * width + j;"] * self.nest.sees(COL)
        return [
            "const int64_t i = line * width + j;",
            *position,
            *column,
            *self._vectors("column", COL),
            *self.write.body(),
        ]

    def _vector(self, parameter: Parameter, index: str) -> str:
        cast = "(float)" if parameter.type == "float" else ""
        return f"{cast}{super()._vector(parameter, index)}"

    def _begun(self, reduction: Result) -> list[str]:
        return [f"double {self.write.names[reduction.name]} = {NOTHING[reduction.value.op]};"]

    def _total(self, reduction: Result) -> str:
        return self.write.names[reduction.name]

    def _emptied(self, level: Level) -> list[str]:
        lines = [f"{self.write.at[r.name]}[matrix * width + j] = {NOTHING[r.value.op]};" for r in level.empties]
        return loop("j", "left", "right", lines) if lines else []

    def _simd(self) -> list[str]:
        """The directive for sums in vectors. The order of additions follows from the length of the loop alone."""
        totals = self.nest.totals(ROW, TENSOR)
        if not totals or any(r.value.op is not Op.SUM for r in totals):
            return []
        names = ", ".join(self._total(r) for r in totals)
        return ["#ifdef _OPENMP", f"#pragma omp simd reduction(+ : {names})", "#endif"]
