"""Triton's spelling of operations and numbers, in float32 and float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from rulec.backend.printer import OpTable, is_number
from rulec.language.expr.node import Op
from rulec.language.expr.ops import FUNCTIONS as ELEMENTWISE

from ..common.text import chance_call
from .words import WORDS

_OPERATORS: OpTable = {
    Op.ADD: "({} + {})", Op.SUB: "({} - {})", Op.MUL: "({} * {})", Op.NEG: "(-{})",
    Op.LT: "({} < {})", Op.LE: "({} <= {})", Op.GT: "({} > {})", Op.GE: "({} >= {})", Op.EQ: "({} == {})",
    Op.NE: "({} != {})", Op.AND: "({} & {})", Op.OR: "({} | {})", Op.NOT: "({} == 0)",
    Op.ABS: "tl.abs({})", Op.ISFINITE: '(tl.abs({}) < float("inf"))',
}  # fmt: skip
_WORDS: Mapping[Op, str] = {
    Op.POW: "power", Op.MOD: "remainder", Op.SIN: "sin", Op.COS: "cos", Op.AWAY: "away", Op.ULPS: "ulps",
    Op.COARSE: "coarse",
    # The functions that are printed under their own names.
    **{op: op.symbol for op in ELEMENTWISE if op.symbol in WORDS},
}  # fmt: skip

#: Functions with another name in float64.
_WIDE: Mapping[str, str] = {
    "exp": "tl.exp", "log": "tl.log", "erf": "tl.erf", "floor": "tl.floor", "sin": "tl.sin", "cos": "tl.cos",
    **{name.removesuffix("_64"): name for name in WORDS if name.endswith("_64")},
}  # fmt: skip


def operations(compute: str) -> OpTable:
    """The table for code in float32 or float64. Triton's plain `/`, `sqrt` and `maximum` are not IEEE's."""

    def typed(text: str) -> str:
        return f"tl.full((), {text}, tl.{compute})" if is_bare(text) else text

    def call(function: str, last: str = "") -> Callable[..., str]:
        return lambda *operands: f"{function}({', '.join(map(typed, operands))}{last})"

    narrow = compute == "float32"
    quotient = "tl.div_rn({}, {})" if narrow else "({} / {})"
    floor = "floor" if narrow else "tl.floor"
    root = "tl.sqrt_rn({})" if narrow else "tl.sqrt({})"
    propagate = ", propagate_nan=tl.PropagateNan.ALL"
    return {
        **_OPERATORS,
        **{op: call(name if narrow else _WIDE.get(name, name)) for op, name in _WORDS.items()},
        Op.CHANCE: lambda _, *words: chance_call(["start + i"], [*map(typed, words)]),
        Op.DIV: quotient,
        Op.FLOORDIV: f"{floor}({quotient})",
        Op.SQRT: root,
        Op.RSQRT: quotient.format("1.0", root),
        Op.WHERE: call("tl.where"),
        Op.MINIMUM: call("tl.minimum", propagate),
        Op.MAXIMUM: call("tl.maximum", propagate),
    }


def is_bare(text: str) -> bool:
    """Whether a printed expression is a number without a dtype."""
    return is_number(text) or text.removeprefix("-").startswith("float(")


def constant(value: float, compute: str) -> str:
    """A number as text: bare if it is a normal float32, as Triton reads it, else with its dtype."""
    if not np.isfinite(value):
        return f'{"-" if value < 0 else ""}float("{"nan" if np.isnan(value) else "inf"}")'
    with np.errstate(all="ignore"):
        single = float(np.float32(value))
    normal = value == 0 or (abs(value) >= 2.0**-126 and np.isfinite(single))
    if normal and (compute == "float32" or single == value):
        return repr(value)
    return f"tl.full((), {value!r}, tl.{compute})"


def rounded(value: str, dtype: str, before: str) -> str:
    """A value of the dtype `before` rounded to `dtype`; unchanged where `dtype` is not narrower."""
    if dtype in ("float32", before):
        return value
    wide = value if before == "float32" else f"{value}.to(tl.float32)"
    return f"to_bfloat16({wide}, EMULATED)" if dtype == "bfloat16" else f"{wide}.to(tl.float16)"
