"""What a stage does to one tensor, as a nest of loops: what each level is given, begins, and leaves.

    tensor            its totals
      matrix          reads what it has one value of; empties the totals of its columns
        row           reads what it has one value of; its totals
          element     loads, values, stores, and what is taken into all of these totals

A stage that sees elements alike has the first and the last level alone. Rows and columns are those in memory.
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
    """What is done once for each of `place`: vectors are read, totals of columns emptied, others begun and left."""

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
        """Whether the stage must know the row or column of an element."""
        return is_shaped(self.program, self.stage, self.layout)

    @property
    def buffers(self) -> list[str]:
        """The buffers that the stage loads or stores, in the program's order."""
        return used_buffers(self.program, self.stage)

    @property
    def stored(self) -> list[str]:
        """The buffers that the stage stores, in the order in which it does."""
        return [s.buffer for s in self.stage.stores]

    @property
    def vectors(self) -> list[Result]:
        """What the stage reads beside buffers and the scalar table."""
        return [self.program.result(name) for name in self.stage.reads]

    def place(self, value: Result) -> str:
        """Where a vector or a total has one value."""
        return place(value.axes, self.layout)

    def read(self, *places: str) -> list[Result]:
        """The vectors that have one value at each of such places."""
        return [v for v in self.vectors if self.place(v) in places]

    def totals(self, *places: str) -> list[Result]:
        """The reductions that keep one number for each of such places."""
        return [r for r in self.stage.reduces if self.place(r) in places]

    def sees(self, where: str) -> bool:
        """Whether anything is read or reduced of which there is one value at each such place."""
        return bool(self.read(where) or self.totals(where))

    def levels(self, shaped: bool | None = None) -> list[Level]:
        """The levels, from the outside in; a part of a stage is `shaped` as the whole of it is."""
        tensor, element = Level(TENSOR, totals=tuple(self.totals(TENSOR))), Level(ELEMENT)
        if not (self.shaped if shaped is None else shaped):
            return [tensor, element]
        matrix = Level(MATRIX, tuple(self.read(MATRIX)), empties=tuple(self.totals(COL)))
        return [tensor, matrix, Level(ROW, tuple(self.read(ROW)), totals=tuple(self.totals(ROW))), element]

    def levels_of_one_matrix(self) -> list[Level]:
        """The levels of a function that is called for each matrix: the outermost has the tensor's totals."""
        tensor, *inner = self.levels()
        return [replace(inner[0], totals=tensor.totals), *inner[1:]] if self.shaped else [tensor, *inner]


class Loops(Protocol):
    """How a language of loops writes a level: each method gives lines of text."""

    def enter(self, level: Level) -> list[str]:
        """What is known once the level is entered: vectors that are read, totals that are emptied and begun."""
        ...

    def loop(self, level: Level, body: list[str]) -> list[str]:
        """The loop over all of a level inside the one around it."""
        ...

    def leave(self, level: Level) -> list[str]:
        """The totals, left in their slots."""
        ...

    def element(self) -> list[str]:
        """What is done with one element."""
        ...


def written(levels: Sequence[Level], loops: Loops) -> list[str]:
    """The lines of a nest: those of its first level, with the loop over the others inside."""
    level, *inner = levels
    if not inner:
        return loops.element()
    return [*loops.enter(level), *loops.loop(inner[0], written(inner, loops)), *loops.leave(level)]
