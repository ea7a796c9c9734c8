"""A stage over one tensor as a nest of loops: the reads, totals and values of each level.

    tensor            its totals
      matrix          reads its vectors; empties the totals of its columns
        row           reads its vectors; its totals
          element     loads, values, stores, and additions to all these totals

A stage without rows and columns has only the first and the last level. Rows and columns are as in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rulec.compiler.ir import Program, Result, Stage
from rulec.compiler.layout import Layout
from rulec.kernel.place import COL, ELEMENT, MATRIX, ROW, TENSOR, is_shaped, place, used_buffers


@dataclass(frozen=True)
class Level:
    """One level of a nest: once for each `place`, it `reads` vectors, `empties` totals of columns, keeps `totals`."""

    place: str
    reads: tuple[Result, ...] = ()
    empties: tuple[Result, ...] = ()
    totals: tuple[Result, ...] = ()


@dataclass(frozen=True)
class Nest:
    """One stage of a program, by the places of its values in memory."""

    program: Program
    layout: Layout
    stage: Stage

    @property
    def shaped(self) -> bool:
        """Whether the stage needs the row or column of an element."""
        return is_shaped(self.program, self.stage, self.layout)

    @property
    def buffers(self) -> list[str]:
        """The buffers loaded or stored by the stage, in the program's order."""
        return used_buffers(self.program, self.stage)

    @property
    def stored(self) -> list[str]:
        """The buffers stored by the stage, in the order of its stores."""
        return [s.buffer for s in self.stage.stores]

    @property
    def vectors(self) -> list[Result]:
        """The vectors read by the stage."""
        return [self.program.result(name) for name in self.stage.reads]

    def place(self, value: Result) -> str:
        """The place of a vector or a total: it has one value for each."""
        return place(value.axes, self.layout)

    def read(self, *places: str) -> list[Result]:
        """The vectors of the stage at these places."""
        return [v for v in self.vectors if self.place(v) in places]

    def totals(self, *places: str) -> list[Result]:
        """The reductions of the stage at these places."""
        return [r for r in self.stage.reduces if self.place(r) in places]

    def sees(self, where: str) -> bool:
        """Whether the stage has a vector or a reduction at this place."""
        return bool(self.read(where) or self.totals(where))

    def levels(self, shaped: bool | None = None) -> list[Level]:
        """The levels, from the outside in. For a part of a stage, `shaped` is that of the whole stage."""
        tensor, element = Level(TENSOR, totals=tuple(self.totals(TENSOR))), Level(ELEMENT)
        if not (self.shaped if shaped is None else shaped):
            return [tensor, element]
        matrix = Level(MATRIX, tuple(self.read(MATRIX)), empties=tuple(self.totals(COL)))
        return [tensor, matrix, Level(ROW, tuple(self.read(ROW)), totals=tuple(self.totals(ROW))), element]

    def levels_of_one_matrix(self) -> list[Level]:
        """The levels of a function called for each matrix: the outermost has the tensor's totals."""
        tensor, *inner = self.levels()
        return [replace(inner[0], totals=tensor.totals), *inner[1:]] if self.shaped else [tensor, *inner]


class Loops(Protocol):
    """The text of levels in a language of loops. Each method gives lines of text."""

    def enter(self, level: Level) -> list[str]:
        """The begin of a level: vectors are read, totals emptied and begun."""
        ...

    def loop(self, level: Level, body: list[str]) -> list[str]:
        """The loop over all of a level inside the one around it."""
        ...

    def leave(self, level: Level) -> list[str]:
        """The end of a level: totals are stored in their slots."""
        ...

    def element(self) -> list[str]:
        """The work for one element."""
        ...


def written(levels: Sequence[Level], loops: Loops) -> list[str]:
    """The lines of a nest: of its first level, around the loop over the others."""
    level, *inner = levels
    if not inner:
        return loops.element()
    return [*loops.enter(level), *loops.loop(inner[0], written(inner, loops)), *loops.leave(level)]
