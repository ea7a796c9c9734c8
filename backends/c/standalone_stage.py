"""Prints one stage of a program as a C function of one chunk, or one tile, of a tensor."""

from __future__ import annotations

from rulec.compiler.ir import Result
from rulec.kernel.nest import Level, written
from rulec.kernel.place import COL, ELEMENT, MATRIX, ROW, TENSOR
from rulec.language.node import Op, is_boolean
from rulec.standalone.cases import Version

from .print import NOTHING, ElementWriter, Parameter
from .standalone_text import block, loop, signature
from .standalone_words import C99

#: Where the value of a row, column or matrix lies among its like, in the loops of a tile.
_INDEX = {ROW: "line", COL: "column", MATRIX: "matrix"}

#: The range of elements that a stage's function is called for: a chunk of a tensor, or a tile of its matrices.
_FLAT = ("int64_t start", "int64_t stop")
_TILED = ("int64_t matrix", "int64_t top", "int64_t bottom", "int64_t left", "int64_t right", "int64_t height",
          "int64_t width")  # fmt: skip


class StageText(ElementWriter):
    """One stage of a version as a function `name`, with the c backend's text of an element in its loops."""

    def __init__(self, version: Version, index: int, name: str) -> None:
        super().__init__(version.program, version.layout, version.program.stages[index], C99, name)

    def passed(self) -> list[Parameter]:
        """What the function is given beside a range: buffers, vectors, scalars, and where reductions are left."""
        return [p for p in self.parameters() if p.kind != "index"]

    def declared(self) -> list[str]:
        """The parameters of the function."""
        range_of = _TILED if self.nest.shaped else _FLAT
        return [*range_of, *(self._declared(p) for p in self.passed())]

    def _declared(self, parameter: Parameter) -> str:
        if parameter.kind == "buffer":
            return f"{parameter.type}restrict {parameter.name}"
        if parameter.kind == "vector" and parameter.place == ELEMENT:
            return f"{parameter.type}restrict {parameter.name}"
        if parameter.kind == "vector":
            return f"const double *restrict {self.at[parameter.of]}"
        return parameter.declaration if parameter.kind == "scalar" else f"double *restrict {self.at[parameter.of]}"

    def text(self) -> str:
        """The printed function."""
        lines = written(self.nest.levels_of_one_matrix(), self)
        return "\n".join([*signature(f"static void {self.name}", self.declared()), *block(lines)]) + "\n"

    # Loops: a tile lies in one matrix

    def enter(self, level: Level) -> list[str]:
        """Values of a matrix or a row, totals begun, and totals of columns emptied."""
        cleared = [f"{self.at[r.name]}[matrix * width + j] = {NOTHING[r.value.op]};" for r in level.empties]
        return [
            *["const int64_t line = matrix * height + k;"] * (level.place == ROW), *self._vector_lines(level.place),
            *(f"double {self.names[r.name]} = {NOTHING[r.value.op]};" for r in level.totals),
            *(loop("j", "left", "right", cleared) if cleared else []),
        ]  # fmt: skip

    def loop(self, level: Level, body: list[str]) -> list[str]:
        """A loop over the rows of a tile, or the elements of a row or a chunk."""
        if level.place == ROW:
            return loop("k", "top", "bottom", body)
        ends = ("j", "left", "right") if self.nest.shaped else ("i", "start", "stop")
        return [*self._simd(), *loop(*ends, body)]

    def leave(self, level: Level) -> list[str]:
        """Totals of rows by their place among all rows, those of a tensor in the tile's own slot."""
        index = "line" if level.place == ROW else "0"
        return [f"{self.at[r.name]}[{index}] = {self.names[r.name]};" for r in level.totals]

    def element(self) -> list[str]:
        """What is done with one element."""
        if not self.nest.shaped:
            return self.body()
        return [
            "const int64_t i = line * width + j;",
            *["const int64_t column = matrix * width + j;"] * self.nest.sees(COL),
            *self._vector_lines(COL), *self.body(),
        ]  # fmt: skip

    def _vector_lines(self, where: str) -> list[str]:
        return [self._vector_line(v, f"{self.at[v.name]}[{_INDEX[where]}]") for v in self.nest.read(where)]

    def _vector_line(self, vector: Result, text: str) -> str:
        number = text if self.real == "double" else f"(float){text}"
        value = f"{text} != 0" if is_boolean(vector.value) else number
        return f"const {self._type(vector.value)} {self.names[vector.name]} = {value};"

    def _simd(self) -> list[str]:
        """Lets compilers sum in vectors: which sums an inner loop then has depends on its length alone."""
        totals = self.nest.totals(ROW, TENSOR)
        if not totals or any(r.value.op is not Op.SUM for r in totals):
            return []
        names = ", ".join(self.names[r.name] for r in totals)
        return ["#ifdef _OPENMP", f"#pragma omp simd reduction(+ : {names})", "#endif"]

    def _total(self, reduction: Result) -> str:
        in_column = self.nest.place(reduction) == COL
        return f"{self.at[reduction.name]}[column]" if in_column else self.names[reduction.name]
