"""Prints one stage of a program as a C function of one chunk, or one tile, of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rulec.backend.printer import OpTable, StagePrinter, unique_name
from rulec.compiler.ir import Result
from rulec.language.node import Node, Op, is_boolean, walk
from rulec.standalone.c_text import block, loop, signature
from rulec.standalone.c_words import NOTHING, RESERVED, TYPES, cast, literal, operations
from rulec.standalone.cases import Version
from rulec_backends.plan import COL, ELEMENT, MATRIX, ROW, TENSOR, is_shaped, place

#: Where the value of a row, column or matrix lies among its like, in the loops of a tile.
_INDEX = {ELEMENT: "i", ROW: "line", COL: "column", MATRIX: "matrix"}

#: The range of elements that a stage's function is called for: a chunk of a tensor, or a tile of its matrices.
FLAT = ("int64_t start", "int64_t stop")
TILED = ("int64_t matrix", "int64_t top", "int64_t bottom", "int64_t left", "int64_t right", "int64_t height",
         "int64_t width")  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """A parameter of a stage's function. `kind` is `buffer`, `vector`, `reduction` or `scalar`, `of` its name."""

    kind: str
    of: str
    declared: str
    name: str


class StageText:
    """One stage of a version as a function `name`."""

    def __init__(self, version: Version, index: int, name: str) -> None:
        self.version, self.name = version, name
        self.program, self.layout = version.program, version.layout
        self.stage = self.program.stages[index]
        self.compute, self.real = self.layout.compute, TYPES[self.layout.compute]
        self.shaped = is_shaped(self.program, self.stage, self.layout)
        taken = set(RESERVED)
        ops: OpTable = operations(self.compute)
        arrays = [b.name for b in self.program.buffers if b.axes.elementwise]
        reduced = [r.name for r in self.stage.reduces]
        #: The value of each buffer, vector and reduction.
        self.values = {n: unique_name(n, taken) for n in [*arrays, *self.stage.reads, *reduced]}
        self.at = {n: unique_name(f"{self.values[n]}_at", taken) for n in self.values}
        self.printer = StagePrinter(
            "c", self.program, self.stage, ops, lambda v: literal(v, self.compute), self.values.__getitem__,
            frozenset(taken), self.values.__getitem__,
        )  # fmt: skip
        self.parameters = [*self._buffers(), *self._vectors(), *self._reductions(), *self._scalars()]

    # What it is called with

    def _buffers(self) -> list[Parameter]:
        stored = {s.buffer for s in self.stage.stores}
        used = stored | set(self.printer.loads())
        found = []
        for b in self.program.buffers:
            if b.name in used and b.axes.elementwise:
                element = TYPES[self.layout.dtype(b.name)]
                const = "" if b.name in stored else "const "
                found.append(Parameter("buffer", b.name, f"{const}{element} *restrict {self.at[b.name]}", b.name))
        return found

    def _vectors(self) -> list[Parameter]:
        return [Parameter("vector", n, f"const double *restrict {self.at[n]}", n) for n in self.stage.reads]

    def _reductions(self) -> list[Parameter]:
        return [
            Parameter("reduction", r.name, f"double *restrict {self.at[r.name]}", r.name) for r in self.stage.reduces
        ]

    def _scalars(self) -> list[Parameter]:
        found = []
        for i in self.printer.columns_used():
            kind = "int" if is_boolean(self.program.columns[i].value) else self.real
            name = self.printer.column(i)
            found.append(Parameter("scalar", str(i), f"{kind} {name}", name))
        return found

    # The function

    def text(self) -> str:
        """The printed function."""
        declared = [*(TILED if self.shaped else FLAT), *(p.declared for p in self.parameters)]
        body = self._tile() if self.shaped else self._chunk()
        return "\n".join([*signature(f"static void {self.name}", declared), *block(body)]) + "\n"

    def _chunk(self) -> list[str]:
        return [
            *self._begin(TENSOR), *self._simd(TENSOR), *loop("i", "start", "stop", self._element()), *self._end(TENSOR)
        ]  # fmt: skip

    def _tile(self) -> list[str]:
        columns = bool(self._at_place(COL))
        element = [
            "const int64_t i = line * width + j;", *["const int64_t column = matrix * width + j;"] * columns,
            *self._element(),
        ]  # fmt: skip
        inner = [
            "const int64_t line = matrix * height + k;", *self._vector_lines(ROW), *self._begin(ROW),
            *self._simd(ROW), *loop("j", "left", "right", element), *self._end(ROW, "line"),
        ]  # fmt: skip
        cleared = [f"{self.at[r.name]}[matrix * width + j] = {NOTHING[r.value.op]};" for r in self._reduced(COL)]
        before = loop("j", "left", "right", cleared) if cleared else []
        return [
            *self._vector_lines(MATRIX), *self._begin(TENSOR), *before, *loop("k", "top", "bottom", inner),
            *self._end(TENSOR),
        ]  # fmt: skip

    def _at_place(self, where: str) -> list[Result]:
        results = [self.program.result(n) for n in self.stage.reads] + list(self.stage.reduces)
        return [r for r in results if place(r.axes, self.layout) == where]

    def _element(self) -> list[str]:
        printer = self.printer
        lines = [f"const {self.real} {self.values[b]} = {self._load(b)};" for b in printer.loads()]
        lines += [*self._vector_lines(COL), *self._vector_lines(ELEMENT)]
        for value, (name, text) in zip(self._named(), printer.lines(), strict=True):
            lines.append(f"const {'int' if is_boolean(value) else self.real} {name} = {text};")
        # Every value is computed before the first is stored: stores cannot change what another reads.
        stores = [(s.buffer, printer.text(s.value)) for s in self.stage.stores]
        lines += [f"{self.at[buffer]}[i] = {self._narrow(buffer, text)};" for buffer, text in stores]
        return [*lines, *self._reduce_lines()]

    def _named(self) -> list[Node]:
        return [v for v in walk(self.stage.roots) if v in self.printer.names]

    def _load(self, buffer: str) -> str:
        return f"{self.at[buffer]}[i]"

    def _narrow(self, buffer: str, text: str) -> str:
        narrow = self.layout.dtype(buffer) != self.compute
        return cast(text, "float32") if narrow else text

    def _vector_lines(self, where: str) -> list[str]:
        found = []
        for name in self.stage.reads:
            vector = self.program.result(name)
            if place(vector.axes, self.layout) == where:
                text = f"{self.at[name]}[{_INDEX[where]}]"
                truth = is_boolean(vector.value)
                value = f"{text} != 0.0" if truth else cast(text, self.compute)
                found.append(f"const {'int' if truth else self.real} {self.values[name]} = {value};")
        return found

    # Reductions

    def _reduced(self, where: str) -> list[Result]:
        return [r for r in self.stage.reduces if place(r.axes, self.layout) == where]

    def _begin(self, where: str) -> list[str]:
        return [f"double {self.values[r.name]} = {NOTHING[r.value.op]};" for r in self._reduced(where)]

    def _simd(self, where: str) -> list[str]:
        """Lets compilers sum in vectors, where that is all that an inner loop reduces."""
        names = [self.values[r.name] for r in self._reduced(where)]
        inner = [r for r in self.stage.reduces if self.shaped or place(r.axes, self.layout) == where]
        if not names or any(r.value.op is not Op.SUM for r in inner) or len(names) < len(inner):
            return []
        return ["#ifdef _OPENMP", f"#pragma omp simd reduction(+ : {', '.join(names)})", "#endif"]

    def _end(self, where: str, index: str = "0") -> list[str]:
        return [f"{self.at[r.name]}[{index}] = {self.values[r.name]};" for r in self._reduced(where)]

    def _reduce_lines(self) -> list[str]:
        lines = []
        for r in self.stage.reduces:
            columns = place(r.axes, self.layout) == COL
            total = f"{self.at[r.name]}[column]" if columns else self.values[r.name]
            lines.append(_taken_in(r, total, self.printer.text(r.value.args[0])))
        return lines


def _taken_in(reduction: Result, total: str, text: Sequence[str] | str) -> str:
    """The statement that takes one more number into a reduction, in double."""
    if reduction.value.op is Op.SUM:
        return f"{total} += {text};"
    function = "minimum" if reduction.value.op is Op.MIN else "maximum"
    return f"{total} = {function}({total}, {text});"
