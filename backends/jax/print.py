"""How the jax backend spells a stage: values, then reductions, and new values returned."""

from __future__ import annotations

from collections.abc import Mapping

from rulec.backend.layout import Layout
from rulec.backend.printer import bare
from rulec.compiler.ir import Program, Result
from rulec.language.node import Op

from ..array_print import Dialect, StageFunction

DIALECT = Dialect(
    backend="jax",
    module="jnp",
    parameters=(),
    imports=("import jax.numpy as jnp",),
    functions={
        "cbrt": "from rulec_backends.jax.words import cbrt",
        "erf": "from jax.scipy.special import erf",
        "power": "from jax.numpy import power",
        "sigmoid": "from jax.nn import sigmoid",
    },
    cast="{}.astype(jnp.{})",
    number="jnp.{1}({0})",
    copy="{}",
    writes=False,
)

#: The axis of the matrices that a reduction takes away, by the level that remains.
_AXIS = {"row": ", axis=2, keepdims=True", "col": ", axis=1, keepdims=True"}

#: What reducing nothing gives: XLA has no least element of nothing.
_INITIAL = {Op.MIN: "jnp.inf", Op.MAX: "-jnp.inf"}


class JaxFunction(StageFunction):
    """One stage as a function that returns the new values of its buffers, and its reductions where it has any."""

    def __init__(self, program: Program, layout: Layout, index: int) -> None:
        super().__init__(DIALECT, program, layout, index)
        self.index = index

    def text(self) -> str:
        """The printed function."""
        return self.source(self._summary(), self._ending)

    def _summary(self) -> str:
        count, compute = len(self.program.stages), self.layout.compute
        if count == 1 and not self.reductions and not self.sees_matrices:
            return f"New values of one tensor's buffers, in {compute}. Arrays are of one shape, scalars 0-d."
        what = "New values of one tensor's buffers" if count == 1 else f"Stage {self.index} of {count} for one tensor"
        shapes = "(batch, rows, cols) or less" if self.sees_matrices else "of one shape"
        returned = ", and reductions in float64" if self.reductions else ""
        return f"{what}{returned}. Arrays are {shapes}, scalars 0-d; computed in {compute}."

    def _ending(self, written: Mapping[str, str]) -> list[str]:
        lines = [f"{self.reductions[r.name]} = {self._reduction(r)}" for r in self.stage.reduces]
        new = f"{{{', '.join(f'{b!r}: {text}' for b, text in written.items())}}}"
        reduced = ", ".join(f"{name!r}: {local}" for name, local in self.reductions.items())
        return [*lines, f"return {new}, {{{reduced}}}" if reduced else f"return {new}"]

    def _reduction(self, result: Result) -> str:
        operand, axis = bare(self.printer.text(result.value.args[0])), _AXIS.get(str(result.value.arg), "")
        if result.value.op is Op.SUM:
            return f"jnp.sum({operand}{axis}, dtype=jnp.float64)"
        function = "min" if result.value.op is Op.MIN else "max"
        return f"jnp.{function}({operand}{axis}, initial={_INITIAL[result.value.op]}).astype(jnp.float64)"
