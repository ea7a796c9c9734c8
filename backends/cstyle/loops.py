"""The loops of a stage over one chunk of a tensor, in languages of the C family."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rulec.compiler.ir import Program, Result
from rulec.compiler.layout import Layout
from rulec.kernel.multi_tensor.chunks import chunk_columns
from rulec.kernel.nest import Level
from rulec.kernel.place import COL, MATRIX, ROW, TENSOR
from rulec.language.expr.node import Op, is_boolean

from ..common.text import about_stage, column_formula
from .dialect import WIDTH, Dialect, block, comment
from .element import NOTHING, ElementWriter, Parameter
from .words import words_used

#: The variables and functions of loops: no value of a rule gets such a name.
LOCALS = frozenset(
    {
        "Chunk", "LANES", "at", "row", "lane", "matrix", "line", "j", "stop", "back", "fill", "sum_of", "least_of",
        "greatest_of",
    }
)  # fmt: skip

_FLAT_CHUNK = """\
/* A range of elements of a tensor. */
typedef struct {
    int64_t tensor, first, last;
} Chunk;
"""

_CHUNK = """\
/* A range of elements of a tensor; or, where a stage sees matrices, a range of these, of which only some rows
 * and columns belong to the chunk, and where the results for its rows and columns begin. Rows and columns are
 * those in memory. */
typedef struct {
    int64_t tensor, first, last;
    int64_t height, width;
    int64_t top, bottom, left, right;
    int64_t row_slots, col_slots;
} Chunk;
"""

_LANES = """\
/* A sum is taken in lanes that do not wait for one another, and lanes are added in one order: so its bits
 * depend neither on the compiler nor on the width of the processor's vectors. */
enum { LANES = 16 };
"""

_FILL = """\
static void fill(double *lanes, double value)
{
    for (int lane = 0; lane < LANES; lane++)
        lanes[lane] = value;
}
"""

_JOIN = """\
static double <name>(const double *lanes)
{
    double all = lanes[0];
    for (int lane = 1; lane < LANES; lane++)
        all = <joined>;
    return all;
}
"""

#: The function that joins the lanes of a reduction, and the expression that joins one more lane.
_JOINS = {
    Op.SUM: ("sum_of", "all + lanes[lane]"),
    Op.MIN: ("least_of", "minimum(all, lanes[lane])"),
    Op.MAX: ("greatest_of", "maximum(all, lanes[lane])"),
}

#: The index of a value of matrices or rows.
_INDEX = {MATRIX: "matrix", ROW: "line"}


def chunk_type(program: Program, layout: Layout) -> str:
    """The type of a row of the table of chunks."""
    return _CHUNK if chunk_columns(program, layout) > 3 else _FLAT_CHUNK


def helpers(code: str, dialect: Dialect) -> list[str]:
    """The functions called in the code of stages."""
    joins = [join for join in _JOINS.values() if f"{join[0]}(" in code]
    texts = [_JOIN.replace("<name>", name).replace("<joined>", joined) for name, joined in joins]
    fill = [_FILL] if "fill(" in code else []
    return [*words_used("\n".join([code, *texts]), dialect), *([_LANES] if joins else []), *fill, *texts]


class ChunkLoops:
    """One stage: the function of an element, and loops over the elements of a chunk that call it.

    A subclass prints the kernel around the loops, with the addresses of its arrays in the variables `write.at`.
    """

    dialect: Dialect
    writer: type[ElementWriter] = ElementWriter
    #: The index of the slot for the totals of a row, and of a tensor.
    slots: Mapping[str, str] = MappingProxyType({ROW: "line", TENSOR: "chunk"})

    def __init__(self, program: Program, layout: Layout, index: int, name: str) -> None:
        self.program, self.layout, self.index, self.stage = program, layout, index, program.stages[index]
        self.name = name
        self.write = self.writer(program, layout, self.stage, self.dialect, f"{self.name}_element")
        self.nest = self.write.nest

    def _element(self) -> str:
        return "\n".join([*comment(about_stage(self.program, self.index)), self.write.text()])

    # A chunk

    def pointer(self, name: str) -> str:
        """The type of an address that the stage uses; empty for any other."""
        if name in self.nest.buffers:
            return self.write.pointer(name)
        if name in self.stage.reads:
            return f"{self.dialect.memory}const {self.write.real} *"
        return f"{self.dialect.memory}double *" if any(r.name == name for r in self.stage.reduces) else ""

    def slots_of(self, name: str) -> str:
        """The field of a chunk with the place of its first total of rows or columns; empty for any other name."""
        where = next((self.nest.place(r) for r in self.stage.reduces if r.name == name), "")
        return {ROW: "row_slots", COL: "col_slots"}.get(where, "")

    def scalar_lines(self, row: str) -> list[str]:
        """The variables for columns of the scalar table, after the statement `row` that declares the tensor's row."""
        columns = self.write.printer.columns_used()
        if not columns:
            return []
        return [row, *(self._scalar(i) for i in columns)]

    def _scalar(self, column: int) -> str:
        name, truth = self.write.printer.column(column), is_boolean(self.program.columns[column].value)
        cast = "(float)" if self.write.suffix else ""
        value = f"row[{column}] != 0" if truth else f"{cast}row[{column}]"
        line = f"const {'bool' if truth else self.write.real} {name} = {value};"
        formula = column_formula(self.program, column)
        return f"{line}  // {formula}" if formula and len(line) + len(formula) + 8 <= WIDTH else line

    # Loops

    def enter(self, level: Level) -> list[str]:
        """Values of a row or a matrix, first values for totals of its columns, and lanes of totals."""
        return [
            *self._row_lines() * (level.place == ROW), *self._vectors(_INDEX.get(level.place, ""), level.place),
            *(line for r in level.totals for line in self._begun(r)), *self._emptied(level),
        ]  # fmt: skip

    def _row_lines(self) -> list[str]:
        """The place of a row."""
        back = ["const int64_t back = (line - matrix) * at->width;  // from an element to its column"]
        return back * self.nest.sees(COL)

    def loop(self, level: Level, body: list[str]) -> list[str]:
        """A loop over the matrices of a chunk, the lines of a matrix, or the elements of a line or a chunk."""
        if level.place == MATRIX:
            return block("for (int64_t matrix = at->first; matrix < at->last; matrix++)", body)
        if level.place == ROW:
            rows = "matrix * at->height + at->{}"
            return block(f"for (int64_t line = {rows.format('top')}; line < {rows.format('bottom')}; line++)", body)
        if self.nest.shaped:
            return self._loop("line * at->width + at->left", "line * at->width + at->right", body)
        return self._loop("at->first", "at->last", body)

    def _loop(self, start: str, stop: str, body: list[str]) -> list[str]:
        """A loop over neighbouring elements; with totals, in steps of the number of lanes."""
        if not self.nest.totals(ROW, TENSOR):
            return [*self.dialect.simd, *block(f"for (int64_t i = {start}; i < {stop}; i++)", body)]
        return [
            f"const int64_t stop = {stop};", f"int64_t i = {start};",
            *block("for (; i + LANES <= stop; i += LANES)", [
                *self.dialect.simd,
                *block("for (int lane = 0; lane < LANES; lane++)",
                       self.write.call(self._passed("i + lane", "lane"))),
            ]),
            *block("for (int lane = 0; i < stop; i++, lane++)", self.write.call(self._passed("i", "lane"))),
        ]  # fmt: skip

    def leave(self, level: Level) -> list[str]:
        """The stores of totals into their slots."""
        return [f"{self.write.at[r.name]}[{self.slots[level.place]}] = {self._total(r)};" for r in level.totals]

    def _total(self, reduction: Result) -> str:
        """A total, joined over its lanes."""
        return f"{_JOINS[reduction.value.op][0]}({self.write.names[reduction.name]})"

    def element(self) -> list[str]:
        """The call of the element's function."""
        return self.write.call(self._passed("i", ""))

    def _begun(self, reduction: Result) -> list[str]:
        """The lanes of a total, before its loop."""
        name, op = self.write.names[reduction.name], reduction.value.op
        if op is Op.SUM:
            return [f"double {name}[LANES] = {{0}};"]
        return [f"double {name}[LANES];", f"fill({name}, {NOTHING[op]});"]

    def _vectors(self, index: str, where: str) -> list[str]:
        """The values of a row, a matrix or a column."""
        return [
            f"const {p.declaration} = {self._vector(p, index)};"
            for p in self.write.parameters() if p.kind == "vector" and p.place == where
        ]  # fmt: skip

    def _vector(self, parameter: Parameter, index: str) -> str:
        text = f"{self.write.at[parameter.of]}[{index}]"
        return f"{text} != 0" if parameter.type == "bool" else text

    def _emptied(self, level: Level) -> list[str]:
        """A loop that writes the first values into the totals of a matrix's columns."""
        lines = [f"{self.write.at[r.name]}[j] = {NOTHING[r.value.op]};" for r in level.empties]
        column = "matrix * at->width + at->{}"
        head = f"for (int64_t j = {column.format('left')}; j < {column.format('right')}; j++)"
        return block(head, lines) if lines else []

    def place(self, index: str) -> dict[str, str]:
        """The place in its tensor of the element at an index of the loop, and of the loop's first element."""
        return {"position": index, "origin": "line * at->width + at->left" if self.nest.shaped else "at->first"}

    def _passed(self, index: str, lane: str) -> dict[str, str]:
        """The arguments of the element's function that are not variables of the parameter's name."""
        arguments = {"i": index, **self.place(index)}
        for parameter in self.write.parameters():
            if parameter.kind == "vector" and parameter.place == COL:
                arguments[parameter.name] = self._vector(parameter, f"{index} - back")
            elif parameter.kind == "total":
                in_column = any(r.name == parameter.of for r in self.nest.totals(COL))
                name = self.write.at[parameter.of] if in_column else parameter.name
                arguments[parameter.name] = f"&{name}[{f'{index} - back' if in_column else lane}]"
        return arguments
