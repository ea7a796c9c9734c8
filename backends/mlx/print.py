"""Prints a stage for the mlx backend: values, then reductions, then the return of new values."""

from __future__ import annotations

from rulec.compiler.ir import Result
from rulec.language.expr.node import Op
from rulec.language.expr.ops import FUNCTIONS as ELEMENTWISE

from ..common.array_print import BITS_IMPORTS, Dialect
from ..common.functional import PureFunction
from .words import FORMULAS

_WORDS = ("cbrt", "exp", "greatest", "least", "sigmoid", "sign", "total")

DIALECT = Dialect(
    backend="mlx",
    module="mx",
    parameters=(),
    imports=("import mlx.core as mx",),
    functions={"power": "from mlx.core import power"}
    | {name: f"from rulec_backends.mlx.words import {name}" for name in (*_WORDS, *FORMULAS)}
    | BITS_IMPORTS,
    cast="{}.astype(mx.{})",
    number="mx.array({}, mx.{})",
    copy="{}",
    writes=False,
    others={op: op.symbol for op in ELEMENTWISE if op.symbol in (*_WORDS, *FORMULAS)},
    lacks=(Op.ERF, Op.SIN, Op.COS),  # mx.erf has three digits, and the others seven where they work in vectors
)

_REDUCE = {Op.SUM: "total", Op.MIN: "least", Op.MAX: "greatest"}


class MlxFunction(PureFunction):
    """One stage as a function that returns the new values of its buffers, and its reductions, if any."""

    dialect = DIALECT
    reduced_dtype = "float64 on the CPU, float32 elsewhere"

    def reduction(self, result: Result, operand: str, axes: str | None) -> str:
        """A reduction, in the widest dtype of the device."""
        return f"{_REDUCE[result.value.op]}({operand}{f', {axes}' if axes else ''})"
