"""Prints a stage for the jax backend: values, then reductions, then the return of new values.

Sums are rounded explicitly: XLA would turn `(x + a) - b` with numbers a and b into `x + (a - b)`. A rule that rounds to
a grid adds a large number and subtracts it again. With XLA's change it would not round at all.
"""

from __future__ import annotations

from functools import cached_property

from rulec.backend.printer import StagePrinter
from rulec.compiler.ir import Program, Result
from rulec.compiler.layout import Layout
from rulec.language.expr.node import Node, Op, walk
from rulec.language.expr.ops import FUNCTIONS as ELEMENTWISE

from ..common.array_print import BITS_IMPORTS, Dialect
from ..common.functional import PureFunction
from .words import FORMULAS


class SumPrinter(StagePrinter):
    """Prints `rounded(x + a) - b` for a sum with a number, where another number is added or subtracted."""

    @cached_property
    def _held(self) -> set[Node]:
        sums = [value for value in walk(self.stage.roots) if _has_number(value)]
        return {part for value in sums for part in value.args if _has_number(part)}

    def text(self, value: Node, defining: bool = False) -> str:
        """A value as an expression over the names of earlier lines."""
        text, is_name = super().text(value, defining), value in self.names and not defining
        return f"rounded({text})" if value in self._held and not is_name else text


def _has_number(value: Node) -> bool:
    """Whether a value is a sum or a difference with one number for all elements."""
    return value.op in (Op.ADD, Op.SUB) and any(part.op in (Op.CONST, Op.SCALAR) for part in value.args)


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
        **BITS_IMPORTS,
        **{name: f"from rulec_backends.jax.words import {name}" for name in FORMULAS},
    },
    cast="{}.astype(jnp.{})",
    number="jnp.{1}({0})",
    copy="{}",
    writes=False,
    others={op: op.symbol for op in ELEMENTWISE if op.symbol in FORMULAS},
)

#: The extremes of no elements, as XLA has none.
_INITIAL = {Op.MIN: "jnp.inf", Op.MAX: "-jnp.inf"}


class JaxFunction(PureFunction):
    """One stage as a function that returns the new values of its buffers, and its reductions, if any."""

    dialect = DIALECT
    printer_kind = SumPrinter

    def __init__(self, program: Program, layout: Layout, index: int) -> None:
        super().__init__(program, layout, index)
        #: The names of reductions with the same operand as an earlier one, in groups of different operands.
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

    def reduction(self, result: Result, operand: str, axes: str | None) -> str:
        """A reduction in float64."""
        kept = f", axis={axes}, keepdims=True" if axes else ""
        if result.value.op is Op.SUM:
            return f"jnp.sum({operand}{kept}, dtype=jnp.float64)"
        function = "min" if result.value.op is Op.MIN else "max"
        return f"jnp.{function}({operand}{kept}, initial={_INITIAL[result.value.op]}).astype(jnp.float64)"
