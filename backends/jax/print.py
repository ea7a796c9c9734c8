"""How the jax backend spells a stage: values, then reductions, and new values returned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rulec.backend.printer import bare
from rulec.compiler.ir import Program, Result
from rulec.compiler.layout import Layout
from rulec.language.node import Node, Op

from ..array_print import Dialect, StageFunction
from .sums import SumPrinter

DIALECT = Dialect(
    backend="jax",
    module="jnp",
    parameters=(),
    imports=("import jax.numpy as jnp",),
    functions={
        "cbrt": "from rulec_backends.jax.words import cbrt",
        "erf": "from jax.scipy.special import erf",
        "power": "from jax.numpy import power",
        "rounded": "from rulec_backends.jax.words import rounded",
        "sigmoid": "from jax.nn import sigmoid",
    },
    cast="{}.astype(jnp.{})",
    number="jnp.{1}({0})",
    copy="{}",
    writes=False,
)

#: The axes that a reduction takes away, by the level that remains: arguments of the function that reduces by them.
_AXES = {"row": "cols", "col": "rows"}

#: What reducing nothing gives: XLA has no least element of nothing.
_INITIAL = {Op.MIN: "jnp.inf", Op.MAX: "-jnp.inf"}


class JaxFunction(StageFunction):
    """One stage as a function that returns the new values of its buffers, and its reductions where it has any."""

    printer_kind = SumPrinter

    def __init__(self, program: Program, layout: Layout, index: int) -> None:
        levels = {str(r.value.arg) for r in program.stages[index].reduces}
        #: Whether the function takes, before its arrays, which of their axes hold rows and which hold columns.
        self.takes_axes = not levels.isdisjoint(_AXES)
        dialect = replace(DIALECT, parameters=("rows", "cols")) if self.takes_axes else DIALECT
        super().__init__(dialect, program, layout, index)
        self.index = index
        #: The names of reductions of what others before them reduce, too, in groups without two of the same.
        self.repeated = self._repeated()

    def _repeated(self) -> list[list[str]]:
        groups: list[list[str]] = []
        seen: dict[Node, int] = {}
        for reduction in self.stage.reduces:
            operand = reduction.value.args[0]
            seen[operand] = seen.get(operand, 0) + 1
            if seen[operand] > len(groups):
                groups.append([])
            groups[seen[operand] - 1].append(reduction.name)
        return groups[1:]

    def text(self) -> str:
        """The printed function."""
        return self.source(self._summary(), self._ending)

    def _summary(self) -> str:
        count, compute = len(self.program.stages), self.layout.compute
        if count == 1 and not self.reductions and not self.sees_matrices:
            return f"New values of one tensor's buffers, in {compute}. Arrays are of one shape, scalars 0-d."
        what = "New values of one tensor's buffers" if count == 1 else f"Stage {self.index} of {count} for one tensor"
        shapes = "of the tensor's shape or with 1 for some axes" if self.sees_matrices else "of one shape"
        returned = ", and reductions in float64" if self.reductions else ""
        lines = [f"{what}{returned}.", f"Arrays are {shapes}, scalars 0-d; computed in {compute}."]
        lines += ["`rows` are the axes that hold the tensor's rows, `cols` those of its columns."] * self.takes_axes
        return "\n".join([lines[0], "", *(f"    {line}" for line in lines[1:]), "    "])

    def _ending(self, written: Mapping[str, str]) -> list[str]:
        lines = [f"{self.reductions[r.name]} = {self._reduction(r)}" for r in self.stage.reduces]
        new = f"{{{', '.join(f'{b!r}: {text}' for b, text in written.items())}}}"
        reduced = ", ".join(f"{name!r}: {local}" for name, local in self.reductions.items())
        return [*lines, f"return {new}, {{{reduced}}}" if reduced else f"return {new}"]

    def _reduction(self, result: Result) -> str:
        operand, axes = bare(self.printer.text(result.value.args[0])), _AXES.get(str(result.value.arg))
        kept = f", axis={axes}, keepdims=True" if axes else ""
        if result.value.op is Op.SUM:
            return f"jnp.sum({operand}{kept}, dtype=jnp.float64)"
        function = "min" if result.value.op is Op.MIN else "max"
        return f"jnp.{function}({operand}{kept}, initial={_INITIAL[result.value.op]}).astype(jnp.float64)"
