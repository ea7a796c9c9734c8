"""The elementwise operations of the language on torch tensors, as `rulec.language.arithmetic` defines them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rulec.language.node import Op


def _where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """With numbers known here made on the condition's device: copying them there would be waited for.

    Truth from the scalar table is a number.
    """
    condition = condition if condition.dtype is torch.bool else condition != 0
    return torch.where(condition, _beside(a, condition), _beside(b, condition))


def _beside(value: Tensor, other: Tensor) -> Tensor:
    if value.device == other.device:
        return value
    return other.new_full((), value.item(), dtype=value.dtype)


def _power(x: Tensor, y: Tensor) -> Tensor:
    """C99's pow; torch takes the square root for an exponent of 0.5, which is -0 at -0 and NaN at -inf."""
    result = torch.pow(x, y)
    half = torch.eq(y, 0.5)
    special = torch.logical_and(half, torch.logical_or(torch.eq(x, 0), torch.eq(x, -torch.inf)))
    return torch.where(special, torch.abs(x).to(result.dtype), result)


def _sign(x: Tensor) -> Tensor:
    return torch.where(torch.isnan(x), x, torch.sign(x))


def _cbrt(x: Tensor) -> Tensor:
    """A power near the root, and one step of Newton's in float64, away from zero and infinity."""
    size = torch.abs(x.double())
    plain = torch.logical_and(size > 0, size < torch.inf)
    value = torch.where(plain, size, torch.ones_like(size))
    root = torch.pow(value, 1 / 3)
    root = root - (root - value / (root * root)) / 3
    return torch.where(plain, torch.copysign(root, x), x.double()).to(x.dtype)


def _sigmoid(x: Tensor) -> Tensor:
    small = torch.exp(-torch.abs(x))
    return torch.where(torch.signbit(x), small, torch.ones_like(small)) / (1 + small)


#: The operations, in the tensors' own dtype. Numbers known here are 0-d tensors on the CPU, which torch hands to the
#: kernels of any device as arguments.
ARITHMETIC: Mapping[Op, Callable[..., Any]] = {
    Op.ADD: torch.add, Op.SUB: torch.sub, Op.MUL: torch.mul, Op.DIV: torch.div, Op.POW: _power,
    Op.MOD: torch.remainder, Op.FLOORDIV: lambda a, b: torch.floor(torch.div(a, b)), Op.NEG: torch.neg,
    Op.LT: torch.lt, Op.LE: torch.le, Op.GT: torch.gt, Op.GE: torch.ge, Op.EQ: torch.eq, Op.NE: torch.ne,
    Op.AND: torch.logical_and, Op.OR: torch.logical_or, Op.NOT: torch.logical_not,
    Op.WHERE: _where, Op.SQRT: torch.sqrt, Op.RSQRT: lambda x: 1 / torch.sqrt(x), Op.CBRT: _cbrt,
    Op.ABS: torch.abs, Op.SIGN: _sign, Op.EXP: torch.exp, Op.LOG: torch.log, Op.TANH: torch.tanh,
    Op.SIGMOID: _sigmoid, Op.ERF: torch.erf, Op.FLOOR: torch.floor, Op.ISFINITE: torch.isfinite,
    Op.MINIMUM: torch.minimum, Op.MAXIMUM: torch.maximum,
}  # fmt: skip
