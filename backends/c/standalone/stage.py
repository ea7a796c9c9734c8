"""Prints one stage of a program as a standalone C function of one chunk, or one tile, of a tensor.

The helpers of standalone C are here: the functions of `backends/cstyle`, conversions, and folds of the totals of
blocks. Lines are wrapped, in loops and in branches.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from rulec.compiler.ir import Program, Result, Stage
from rulec.kernel.nest import Level, written
from rulec.kernel.place import COL, ELEMENT, MATRIX, ROW, TENSOR
from rulec.kernel.quantized import coded_buffers
from rulec.language.expr.node import Kind, Node, Op
from rulec.standalone.cases import Version

from ...cstyle import words as c_words
from ...cstyle.dialect import Dialect, indented
from ...cstyle.element import NOTHING, STORAGE, ElementPrinter, ElementWriter, Parameter, literal
from ...cstyle.loops import ChunkLoops

_WIDTH = 110


def block(lines: Sequence[str]) -> list[str]:
    """Lines in braces."""
    return ["{", *indented(lines), "}"]


def loop(name: str, start: str, stop: str, body: Sequence[str]) -> list[str]:
    """A loop over whole numbers."""
    return [f"for (int64_t {name} = {start}; {name} < {stop}; {name}++) {{", *indented(body), "}"]


def branch(condition: str, body: Sequence[str]) -> list[str]:
    """Lines under a condition."""
    return [f"if ({condition}) {{", *indented(body), "}"]


def guarded(text: str) -> str:
    """A text whose directives for OpenMP are left out by compilers without it."""
    return re.sub(r"^#pragma omp .*$", r"#ifdef _OPENMP\n\g<0>\n#endif", text, flags=re.MULTILINE)


def signature(head: str, parameters: Sequence[str], end: str = "") -> list[str]:
    """`head(parameters)end` on as many lines as it needs."""
    line = f"{head}({', '.join(parameters) or 'void'}){end}"
    if len(line) <= _WIDTH:
        return [line]
    lines = [""]
    for parameter in parameters:
        if lines[-1] and len(lines[-1]) + len(parameter) > _WIDTH - 7:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{parameter},"
    return [f"{head}(", *(f"    {x}" for x in lines[:-1]), f"    {lines[-1][:-1]}){end}"]


def wrapped(line: str) -> list[str]:
    """A line of code on as many lines as it needs; all after the first are two levels further in."""
    stripped = line.lstrip(" ")
    if len(line) <= _WIDTH or stripped.startswith(("#", "/*", "*", "//", 'return "')):
        return [line]
    indent = " " * (len(line) - len(stripped))
    code, slashes, remark = stripped.partition("  // ")
    if slashes:
        return [f"{indent}// {remark}", *wrapped(f"{indent}{code}")]
    return textwrap.wrap(
        stripped, _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}    ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def extents(view: str, lines: Sequence[str]) -> list[str]:
    """The definitions of a tensor's extents named in lines, from `view->` or `view.`."""
    names = ("ndim", "count", "batch", "rows", "cols")
    return [f"const int64_t {x} = {view}{x};" for x in names if any(re.search(rf"(?<![>.\w]){x}\b", y) for y in lines)]


#: The C type of each stored dtype; elements of 16 bits move as integers.
TYPES: Mapping[str, str] = STORAGE

_NAMES = """
    malloc calloc free t fold_sum fold_min fold_max room
    newton_schulz newton_schulz_by_gram dot gram_matrix symmetric_product long_product
    i j k line column matrix chunk chunks tile tiles start stop top bottom left right height width batch rows cols
    count ndim shape param grad state head places result view hyper work status bytes blocks parts at base end block
    aside below tall down across values element grad_scale first position origin
"""

#: Names that no value of a rule may have, with words of Fortran and Julia, where hyper-parameters are printed too.
RESERVED = (
    c_words.RESERVED | frozenset(_NAMES.split()) | {"end", "function", "module", "begin", "let", "global", "local"}
)

#: The language, for the c backend's printer.
C99 = Dialect("c", function="static inline", reserved=RESERVED)

_FOLD = """\
/* <what>: `parts` is blocks times count, and the result replaces its first block. */
static void <name>(double *parts, int64_t blocks, int64_t count)
{
    for (int64_t block = 1; block < blocks; block++) {
        for (int64_t i = 0; i < count; i++) {
            parts[i] = <folded>;
        }
    }
}
"""

_OTHER = "parts[block * count + i]"
_FOLDS: Mapping[str, tuple[str, str]] = {
    "fold_sum": ("Adds up what blocks left, in their order", f"parts[i] + {_OTHER}"),
    "fold_min": ("The least of what blocks left", f"minimum(parts[i], {_OTHER})"),
    "fold_max": ("The greatest of what blocks left", f"maximum(parts[i], {_OTHER})"),
}


def words_used(text: str) -> str:
    """The source of every function that a printed text calls without defining it, each before its use."""
    folds = [
        _FOLD.replace("<name>", name).replace("<what>", what).replace("<folded>", folded)
        for name, (what, folded) in _FOLDS.items()
        if re.search(rf"\b{name}\(", text)
    ]
    words = c_words.words_used("\n".join([*folds, text]), C99)
    return "".join(f"{word.rstrip()}\n\n" for word in [*words, *folds])


def widened(text: str, dtype: str) -> str:
    """A stored element as a double."""
    if dtype in ("bfloat16", "float16"):
        return f"from_{dtype}({text})"
    return text


def narrowed(text: str, dtype: str) -> str:
    """A double converted to a stored dtype, rounded once."""
    if dtype == "float64":
        return text
    if dtype == "float32":
        return (
            f"(float){text}"
            if re.fullmatch(r"[\w.>\[\]-]+|\w+\(.*\)", text) and "-" not in text[:1]
            else f"(float)({text})"
        )
    return f"to_{dtype}(to_odd({text}))"


def number_text(program: Program, value: Node, known: Callable[[Node], str | None]) -> str:
    """An expression in double. `known(value)` gives the text of a leaf or a named value, else None."""
    return ElementPrinter("c", program, Stage(), {}, literal, known=known).text(value)


def expression(program: Program, value: Node, leaf: Callable[[Node], str]) -> str:
    """An expression of numbers in double, with all its operands; `leaf` gives the text of a leaf."""
    return number_text(program, value, lambda n: leaf(n) if n.op.kind is Kind.LEAF else None)


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
