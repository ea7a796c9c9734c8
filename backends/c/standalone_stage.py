"""Prints one stage of a program as a C function of one chunk, or one tile, of a tensor."""

from __future__ import annotations

from rulec.compiler.ir import Result
from rulec.language.node import Op, is_boolean
from rulec.standalone.cases import Version

from ..plan import COL, ELEMENT, MATRIX, ROW, TENSOR, is_shaped, place
from .print import ElementWriter, Parameter
from .standalone_text import block, loop, signature
from .standalone_words import C99, NOTHING

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
        self.shaped = is_shaped(self.program, self.stage, self.layout)

    def passed(self) -> list[Parameter]:
        """What the function is given beside a range: buffers, vectors, scalars, and where reductions are left."""
        return [p for p in self.parameters() if p.kind != "index"]

    def declared(self) -> list[str]:
        """The parameters of the function."""
        range_of = _TILED if self.shaped else _FLAT
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
        body = self._tile() if self.shaped else self._chunk()
        return "\n".join([*signature(f"static void {self.name}", self.declared()), *block(body)]) + "\n"

    def _chunk(self) -> list[str]:
        return [*self._begin(TENSOR), *self._simd(), *loop("i", "start", "stop", self.body()), *self._end(TENSOR)]

    def _tile(self) -> list[str]:
        element = [
            "const int64_t i = line * width + j;", *["const int64_t column = matrix * width + j;"] * self._has(COL),
            *self._vector_lines(COL), *self.body(),
        ]  # fmt: skip
        inner = [
            "const int64_t line = matrix * height + k;", *self._vector_lines(ROW), *self._begin(ROW),
            *self._simd(), *loop("j", "left", "right", element), *self._end(ROW, "line"),
        ]  # fmt: skip
        cleared = [f"{self.at[r.name]}[matrix * width + j] = {NOTHING[r.value.op]};" for r in self._reduced(COL)]
        return [
            *self._vector_lines(MATRIX), *self._begin(TENSOR),
            *(loop("j", "left", "right", cleared) if cleared else []), *loop("k", "top", "bottom", inner),
            *self._end(TENSOR),
        ]  # fmt: skip

    def _has(self, where: str) -> bool:
        """Whether anything of the stage has one value for each row, column or matrix."""
        results = [*(self.program.result(n) for n in self.stage.reads), *self.stage.reduces]
        return any(place(r.axes, self.layout) == where for r in results)

    def _vector_lines(self, where: str) -> list[str]:
        found = []
        for vector in (self.program.result(name) for name in self.stage.reads):
            if place(vector.axes, self.layout) == where:
                text = f"{self.at[vector.name]}[{_INDEX[where]}]"
                number = text if self.real == "double" else f"(float){text}"
                value = f"{text} != 0" if is_boolean(vector.value) else number
                found.append(f"const {self._type(vector.value)} {self.names[vector.name]} = {value};")
        return found

    # Reductions: in variables of the loops, but for those of columns

    def _reduced(self, where: str) -> list[Result]:
        return [r for r in self.stage.reduces if place(r.axes, self.layout) == where]

    def _begin(self, where: str) -> list[str]:
        return [f"double {self.names[r.name]} = {NOTHING[r.value.op]};" for r in self._reduced(where)]

    def _simd(self) -> list[str]:
        """Lets compilers sum in vectors: which sums an inner loop then has depends on its length alone."""
        found = [r for r in self.stage.reduces if place(r.axes, self.layout) != COL]
        if not found or any(r.value.op is not Op.SUM for r in found):
            return []
        names = ", ".join(self.names[r.name] for r in found)
        return ["#ifdef _OPENMP", f"#pragma omp simd reduction(+ : {names})", "#endif"]

    def _end(self, where: str, index: str = "0") -> list[str]:
        return [f"{self.at[r.name]}[{index}] = {self.names[r.name]};" for r in self._reduced(where)]

    def _totals(self) -> list[str]:
        lines = []
        for r in self.stage.reduces:
            column = place(r.axes, self.layout) == COL
            total = f"{self.at[r.name]}[column]" if column else self.names[r.name]
            text = self.printer.text(r.value.args[0])
            extreme = "minimum" if r.value.op is Op.MIN else "maximum"
            lines.append(f"{total} += {text};" if r.value.op is Op.SUM else f"{total} = {extreme}({total}, {text});")
        return lines
