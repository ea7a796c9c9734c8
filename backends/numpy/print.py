"""Prints a stage for the numpy backend: values, then reductions, then stores."""

from __future__ import annotations

from collections.abc import Mapping

from rulec.backend.printer import bare
from rulec.compiler.ir import Program, Result
from rulec.compiler.layout import Layout
from rulec.language.expr.node import Op

from ..common.array_print import BITS_IMPORTS, Dialect, StageFunction

DIALECT = Dialect(
    backend="numpy",
    module="xp",
    parameters=("xp", "real"),
    imports=(),
    functions={
        name: f"from rulec_backends.numpy.words import {name}"
        for name in ("cbrt", "erf", "greatest", "least", "power", "sigmoid")
    }
    | BITS_IMPORTS,
    cast="real({})",
    number="real({})",
    copy="xp.asarray({}, copy=True)",
)

#: The reduced axis of `(batch, rows, cols)`, by the level of the result.
_AXIS = {"row": "axis=2", "col": "axis=1"}


def copied(program: Program, index: int) -> list[str]:
    """The buffers of a stage to copy first: a store reads their old values, and another store writes them."""
    stores = program.stages[index].stores
    written = {s.buffer for s in stores}
    return [str(s.value.arg) for s in stores if s.value.op is Op.LOAD and s.value.arg in written]


class NumpyFunction(StageFunction):
    """One stage as a function that writes into its arrays and returns its reductions, if any."""

    def __init__(self, program: Program, layout: Layout, index: int) -> None:
        super().__init__(DIALECT, program, layout, index, copied(program, index))
        self.index = index
        if layout.transposed and self.sees_matrices:
            self.printer.ops = {**self.printer.ops, Op.CHANCE: self._turned}

    def _turned(self, *operands: str) -> str:
        """Random bits of matrices whose rows are columns in memory."""
        return f"chance(xp, {', '.join(operands)}, turned=True)"

    def text(self) -> str:
        """The printed function."""
        return self.source(self._summary(), self._ending)

    def _summary(self) -> str:
        count, compute = len(self.program.stages), self.layout.compute
        what = "Update one tensor in place." if count == 1 else f"Stage {self.index} of {count} for one tensor."
        shapes = "(batch, rows, cols) or less" if self.sees_matrices else "of one shape"
        return (
            f"{what} Arrays are {shapes}, scalars 0-d; computed in {compute}.\n\n"
            f"    `xp` is the arrays' namespace, `real` makes {compute} of a number or an array.\n    "
        )

    def _ending(self, written: Mapping[str, str]) -> list[str]:
        lines = [f"{self.reductions[r.name]} = {self._reduction(r)}" for r in self.stage.reduces]
        lines += [f"{self.arrays[b]}[...] = {self._stored(b, text)}" for b, text in written.items()]
        returned = ", ".join(f'"{name}": {local}' for name, local in self.reductions.items())
        return [*lines, f"return {{{returned}}}"] if returned else lines

    def _reduction(self, result: Result) -> str:
        operand = bare(self.printer.text(result.value.args[0]))
        axis = _AXIS.get(str(result.value.arg), "")
        if result.value.op is Op.SUM:
            kept = f", {axis}, keepdims=True" if axis else ""
            return f"xp.sum({operand}{kept}, dtype=xp.float64)"
        function = "least" if result.value.op is Op.MIN else "greatest"
        return f"{function}({operand}{', ' if axis else ''}{axis})"

    def _stored(self, buffer: str, text: str) -> str:
        if self.layout.dtype(buffer) == self.layout.compute:
            return text
        return f"xp.asarray({text}, dtype={self.arrays[buffer]}.dtype)"
