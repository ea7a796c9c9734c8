"""Prints stages as functions that return new arrays, for jax and mlx: their arrays are never written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace

from rulec.backend.printer import bare
from rulec.compiler.ir import Program, Result
from rulec.compiler.layout import Layout

from .array_print import Dialect, StageFunction

#: The names of the reduced axes, by the level of the result: arguments of the printed function.
_AXES = {"row": "cols", "col": "rows"}


class PureFunction(StageFunction, ABC):
    """One stage as a function that returns the new values of its buffers, and its reductions, if any."""

    #: The spelling of its library, and the dtype of reductions, in words.
    dialect: Dialect
    reduced_dtype = "float64"

    def __init__(self, program: Program, layout: Layout, index: int) -> None:
        levels = {str(r.value.arg) for r in program.stages[index].reduces}
        #: Whether the function takes, before its arrays, the numbers of their axes of rows and of columns.
        self.takes_axes = not levels.isdisjoint(_AXES)
        dialect = replace(self.dialect, parameters=("rows", "cols")) if self.takes_axes else self.dialect
        super().__init__(dialect, program, layout, index)
        self.index = index

    @abstractmethod
    def reduction(self, result: Result, operand: str, axes: str | None) -> str:
        """A reduction as an expression: over all of an operand, or over the axes of this name, kept with size 1."""

    def text(self) -> str:
        """The printed function."""
        return self.source(self._summary(), self._ending)

    def _summary(self) -> str:
        count, compute = len(self.program.stages), self.layout.compute
        if count == 1 and not self.reductions and not self.sees_matrices:
            return f"New values of one tensor's buffers, in {compute}. Arrays are of one shape, scalars 0-d."
        what = "New values of one tensor's buffers" if count == 1 else f"Stage {self.index} of {count} for one tensor"
        shapes = "of the tensor's shape or with 1 for some axes" if self.sees_matrices else "of one shape"
        returned = f", and reductions in {self.reduced_dtype}" if self.reductions else ""
        lines = [f"{what}{returned}.", f"Arrays are {shapes}, scalars 0-d; computed in {compute}."]
        lines += ["`rows` are the axes that hold the tensor's rows, `cols` those of its columns."] * self.takes_axes
        return "\n".join([lines[0], "", *(f"    {line}" for line in lines[1:]), "    "])

    def _ending(self, written: Mapping[str, str]) -> list[str]:
        lines = [f"{self.reductions[r.name]} = {self._reduction(r)}" for r in self.stage.reduces]
        new = f"{{{', '.join(f'{b!r}: {text}' for b, text in written.items())}}}"
        reduced = ", ".join(f"{name!r}: {local}" for name, local in self.reductions.items())
        return [*lines, f"return {new}, {{{reduced}}}" if reduced else f"return {new}"]

    def _reduction(self, result: Result) -> str:
        operand = bare(self.printer.text(result.value.args[0]))
        return self.reduction(result, operand, _AXES.get(str(result.value.arg)))
