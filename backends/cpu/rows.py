"""Groups of rows: a stage reads and writes the totals and values of columns once for a group.

The columns of a wide matrix do not fit the nearest cache. Totals that are read and written for every row move 16 bytes
for each element of 4. The update of one element is a function where kernels call it several times in a loop.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from rulec.backend.printer import bare
from rulec.compiler.ir import Result
from rulec.kernel.nest import Level
from rulec.kernel.place import COL, ELEMENT, MATRIX, ROW, TENSOR
from rulec.language.expr.node import Node, Op, walk

from .source import indented, loop
from .stage import StageWriter

#: The rows of a group: each is a stream of memory, and has its totals in registers.
ROWS = 4

#: The columns of a chunk without groups, at most: their totals fit the nearest cache, and one row comes from memory
#: faster than several.
NARROW = 2048

#: The reductions of a stage, at most, whose totals fit the registers.
_MOST = 4

#: The names of this text that no value of a rule gets.
LOCALS = frozenset({"column_total", "alone", *(f"{name}_{row}" for name in ("back", "new") for row in range(ROWS))})


def in_groups(write: StageWriter) -> bool:
    """Whether a stage takes rows in groups: they share columns, and no value depends on the place of an element."""
    stage = write.stage
    coded = any(write.layout.format(buffer) for buffer in write.nest.buffers)
    placed = any(n.op is Op.CHANCE for n in walk(stage.roots))
    return write.shares_columns and len(stage.reduces) <= _MOST and not (coded or placed)


def vectors_of(write: StageWriter) -> list[Result]:
    """The vectors that an element of the stage reads."""
    return write.nest.read(MATRIX, ROW, COL, ELEMENT)


class RowGroup:
    """The text for a group of rows, the first of which is `line`; `function` is the name of an element's function."""

    def __init__(self, write: StageWriter, function: str) -> None:
        self.write, self.function = write, function
        alone = [write.names[r.name] for r in (*write.nest.read(ROW), *write.nest.totals(ROW))]
        #: For each row its variables of vectors and totals, by those of a row by itself.
        self._names = [{name: write.unique(f"{name}_{row}") for name in alone} for row in range(ROWS)]

    def loop(self, level: Level, body: list[str]) -> list[str]:
        """The loop over rows: over the groups of a wide chunk, then over the rows that stay alone."""
        top, alone, bottom = (f"matrix * height + {row}" for row in ("top", "alone", "bottom"))
        return [
            f"alone = bottom - (bottom - top) % {ROWS} if right - left > {NARROW} else top",
            *loop("line", top, f"{alone}, {ROWS}", self._lines(level)), *loop("line", alone, bottom, body),
        ]  # fmt: skip

    def _lines(self, level: Level) -> list[str]:
        """The statements for a group, at the level of rows."""
        write, rows = self.write, range(ROWS)
        elements = [line for row in rows for line in self._element(row)]
        return [
            *(f"back_{row} = (line + {row} - matrix) * width" for row in rows),
            *(self._of(row, line) for row in rows for line in write.vector_lines(ROW, line=f"line + {row}")),
            *(self._of(row, line) for row in rows for line in write.begin_lines(level.totals)),
            *loop("j", "matrix * width + left", "matrix * width + right",
                  [*write.vector_lines(COL), *elements, *self._joined()]),
            *(self._of(row, line) for row in rows for line in write.end_lines(level.totals, f"line + {row}")),
        ]  # fmt: skip

    def _of(self, row: int, line: str) -> str:
        """A statement with the variables of a row."""
        return re.sub(r"\w+", lambda word: self._names[row].get(word[0], word[0]), line)

    def _element(self, row: int) -> list[str]:
        """The statements for the element of a row: its update, and the totals of its row and of sums of a tensor."""
        write = self.write
        update = call(f"new_{row} = {self.function}", arguments(write, vectors_of(write)))
        sums = [r for r in write.nest.totals(TENSOR) if r.value.op is Op.SUM]
        kept = [*write.nest.totals(ROW), *sums]
        lines = [
            f"i = j + back_{row}", *write.load_lines(row), *write.vector_lines(ELEMENT), *update,
            *(
                write.store_line(s.buffer, f"new_{row}[{number}]", row)
                for number, s in enumerate(write.stage.stores)
            ),
            *(f"{write.names[r.name]} = {write.joined(r, write.names[r.name], self._new(r, row))}" for r in kept),
        ]  # fmt: skip
        return [self._of(row, line) for line in lines]

    def _new(self, reduction: Result, row: int) -> str:
        """The value of a row's element that a reduction takes in."""
        return f"new_{row}[{len(self.write.stage.stores) + self.write.stage.reduces.index(reduction)}]"

    def _joined(self) -> list[str]:
        """The totals of a column, which takes in the elements of a group in their order; extremes of a tensor."""
        write = self.write
        extremes = [r for r in write.nest.totals(TENSOR) if r.value.op is not Op.SUM]
        lines = [f"{write.names[r.name]} = {write.joined(r, write.names[r.name], self._extreme(r))}" for r in extremes]
        for r in write.nest.totals(COL):
            slot = write.element(r.name, "j")
            lines.append(f"column_total = load_float64({slot})")
            if r.value.op is Op.SUM:
                lines += [f"column_total = column_total + float64({self._new(r, row)})" for row in range(ROWS)]
            else:
                lines.append(f"column_total = {write.joined(r, 'column_total', self._extreme(r))}")
            lines.append(f"store_float64({slot}, column_total)")
        return lines

    def _extreme(self, reduction: Result) -> str:
        """The extreme of the elements of a group."""
        best = self._new(reduction, 0)
        for row in range(1, ROWS):
            best = self.write.joined(reduction, best, self._new(reduction, row))
        return best


#: The characters in a line, without its indentation.
_WIDTH = 100


def update_function(write: StageWriter, name: str, vectors: Sequence[Result] = ()) -> str:
    """The function: its arguments are `arguments`, its results those of `results`."""
    texts = [bare(write.printer.text(value)) for value in results(write)]
    lines = [*write.value_lines(), f"return {', '.join(texts)}{',' * (len(texts) == 1)}"]
    head = call(f"def {name}", arguments(write, vectors), ":")
    return "\n".join(["@inlined", *head, '    """The new values of one element."""', *indented(lines)])


def arguments(write: StageWriter, vectors: Sequence[Result] = ()) -> list[str]:
    """The old values of an element, the values of vectors, and the scalars."""
    printer = write.printer
    columns = (printer.column(i) for i in printer.columns_used())
    named = [*(write.names[b] for b in printer.loads()), *(write.names[v.name] for v in vectors)]
    return [*named, *columns]


def results(write: StageWriter) -> list[Node]:
    """The values of a stage: first the stored ones, then the reduced ones."""
    return [*(s.value for s in write.stage.stores), *(r.value.args[0] for r in write.stage.reduces)]


def call(function: str, listed: Sequence[str], end: str = "") -> list[str]:
    """A call, or the head of a definition; in several lines where one would be too long."""
    text = ", ".join(listed)
    if len(function) + len(text) <= _WIDTH:
        return [f"{function}({text}){end}"]
    return [f"{function}(", *indented(textwrap.wrap(text, _WIDTH, break_long_words=False)), f"){end}"]
