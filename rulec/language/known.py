"""The number of an expression, where all names in it are known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from rulec.language.arithmetic import NUMPY
from rulec.language.node import Node, Op, walk

_NAMED = (Op.FACT, Op.HYPER, Op.NAME)


#: Operations with results too large for float64 for some finite operands.
_GROWING = (Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.POW, Op.EXP)


class ConstantError(ValueError):
    """A constant too large for float64. The parser adds the place."""


def constant(op: Op, operands: Sequence[float]) -> float:
    """The result of an elementwise operation on constants, in float64: no power is ever computed exactly.

    Raises ConstantError where the operands are finite and the result is too large. A division by zero is infinite, as
    in IEEE 754.
    """
    with np.errstate(all="ignore"):
        number = float(NUMPY[op](*map(np.float64, operands)))
    pole = (op is Op.DIV and operands[1] == 0) or (op is Op.POW and operands[0] == 0)
    if op in _GROWING and math.isinf(number) and all(map(math.isfinite, operands)) and not pole:
        raise ConstantError("this number is larger than a float64 can hold: write inf for infinity")
    return number


def number_known(value: Node, known: Mapping[str, float]) -> float | None:
    """The value of an expression in float64; None where a part of it is not known.

    `known` has values of names, hyper-parameters and shape facts. Reductions, matrix functions and random numbers are
    never known.
    """
    values: dict[Node, Any] = {}
    with np.errstate(all="ignore"):
        for part in walk([value]):
            if part.op is Op.CONST:
                values[part] = np.float64(cast(float, part.arg))
            elif part.op in _NAMED and part.arg in known:
                values[part] = np.float64(known[str(part.arg)])
            elif part.op in NUMPY and all(a in values for a in part.args):
                values[part] = np.float64(NUMPY[part.op](*(values[a] for a in part.args)))
    return float(values[value]) if value in values else None
