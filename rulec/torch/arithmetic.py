"""The elementwise operations of the language on torch tensors, as `rulec.language.arithmetic` defines them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rulec.language.node import Op


def _where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """With numbers known here made on the device of the others: copying them there would be waited for.

    Truth from the scalar table is a number.
    """
    condition = condition if condition.dtype is torch.bool else condition != 0
    device = next((x.device for x in (condition, a, b) if x.device.type != "cpu"), condition.device)
    return torch.where(_on(device, condition), _on(device, a), _on(device, b))


def _on(device: torch.device, value: Tensor) -> Tensor:
    if value.device == device:
        return value
    return torch.full((), value.item(), dtype=value.dtype, device=device)


def _power(x: Tensor, y: Tensor) -> Tensor:
    """C99's pow; torch takes the square root for one exponent of 0.5, or one divided by it for one of -0.5, which are
    negative at -0 and NaN at -inf."""
    result = torch.pow(x, y)
    half = torch.eq(torch.abs(y), 0.5)
    special = torch.logical_and(half, torch.logical_or(torch.eq(x, 0), torch.eq(x, -torch.inf)))
    size = torch.abs(x).to(result.dtype)
    return _where(special, _where(torch.gt(y, 0), size, 1 / size), result)


def _modulo(a: Tensor, b: Tensor) -> Tensor:
    """What is left of a division rounded down, a zero too with the sign of `b`."""
    left = torch.remainder(a, b)
    return _where(torch.eq(left, 0), torch.copysign(torch.zeros_like(left), b), left)


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
    Op.MOD: _modulo, Op.FLOORDIV: lambda a, b: torch.floor(torch.div(a, b)), Op.NEG: torch.neg,
    Op.LT: torch.lt, Op.LE: torch.le, Op.GT: torch.gt, Op.GE: torch.ge, Op.EQ: torch.eq, Op.NE: torch.ne,
    Op.AND: torch.logical_and, Op.OR: torch.logical_or, Op.NOT: torch.logical_not,
    Op.WHERE: _where, Op.SQRT: torch.sqrt, Op.RSQRT: lambda x: 1 / torch.sqrt(x), Op.CBRT: _cbrt,
    Op.ABS: torch.abs, Op.SIGN: _sign, Op.EXP: torch.exp, Op.LOG: torch.log, Op.TANH: torch.tanh,
    Op.SIGMOID: _sigmoid, Op.ERF: torch.erf, Op.FLOOR: torch.floor, Op.ISFINITE: torch.isfinite,
    Op.MINIMUM: torch.minimum, Op.MAXIMUM: torch.maximum,
}  # fmt: skip
