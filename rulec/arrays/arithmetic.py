"""The elementwise operations of the language by an array library's functions: `rulec.language.arithmetic` defines them.

An operation with NumPy's name and meaning in the library is taken from it without further words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rulec.arrays.functions import Functions
from rulec.language.node import Op

Table = Mapping[Op, Callable[..., Any]]

#: Operation -> the one NumPy function for it.
NAMES: Mapping[Op, str] = {
    Op.ADD: "add", Op.SUB: "subtract", Op.MUL: "multiply", Op.DIV: "divide", Op.POW: "power", Op.MOD: "remainder",
    Op.NEG: "negative", Op.LT: "less", Op.LE: "less_equal", Op.GT: "greater", Op.GE: "greater_equal", Op.EQ: "equal",
    Op.NE: "not_equal", Op.AND: "logical_and", Op.OR: "logical_or", Op.NOT: "logical_not", Op.SQRT: "sqrt",
    Op.CBRT: "cbrt", Op.ABS: "abs", Op.EXP: "exp", Op.LOG: "log", Op.TANH: "tanh", Op.ERF: "erf", Op.FLOOR: "floor",
    Op.ISFINITE: "isfinite", Op.MINIMUM: "minimum", Op.MAXIMUM: "maximum",
}  # fmt: skip


def arithmetic(of: Functions, **different: Callable[..., Any]) -> Table:
    """Every operation, in the arrays' own dtype. `different` has the library's own form of some, such as `power`."""
    xp = of.xp
    composed: Table = {
        Op.FLOORDIV: lambda a, b: xp.floor(xp.divide(a, b)), Op.RSQRT: lambda x: 1 / xp.sqrt(x),
        Op.SIGN: lambda x: xp.where(xp.isnan(x), x, xp.sign(x)),
        Op.WHERE: lambda condition, a, b: xp.where(condition != 0, a, b), Op.SIGMOID: _sigmoid(of),
    }  # fmt: skip
    operations = {op: different.get(op.name.lower(), function) for op, function in composed.items()}
    return operations | {op: different.get(name) or getattr(xp, name) for op, name in NAMES.items()}


def _sigmoid(of: Functions) -> Callable[[Any], Any]:
    def sigmoid(x: Any) -> Any:
        """The logistic function without overflow: exp sees only numbers up to 0."""
        small = of.xp.exp(-of.xp.abs(x))
        return of.filled(of.xp.signbit(x), small, 1.0) / (1.0 + small)

    return sigmoid


def meeting(of: Functions, function: Callable[..., Any]) -> Callable[..., Any]:
    """The operation on numbers and arrays: numbers take the dtype of the arrays."""

    def met(*operands: Any) -> Any:
        floats = [x.dtype for x in operands if getattr(x, "ndim", 0) and of.is_float(x)]
        dtype = of.xp.result_type(*floats) if floats else None
        return function(*(of.fitted(x, dtype) for x in operands))

    return met
