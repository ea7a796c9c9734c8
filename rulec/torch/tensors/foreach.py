"""Elementwise operations on several tensors in one call, by torch's foreach functions: one launch on a GPU.

Only operands are taken that torch computes in one launch, with the bits of the operation on each of them. torch divides
by a number that the host knows by way of its reciprocal, so quotients by numbers are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rulec.language.expr.node import Op


def _rsqrt(arrays: Sequence[Tensor]) -> Sequence[Tensor]:
    roots = torch._foreach_sqrt([*arrays])
    torch._foreach_reciprocal_(roots)
    return roots


#: Operations of lists of arrays.
_ARRAYS: Mapping[Op, Callable[..., Sequence[Tensor]]] = {
    Op.ADD: torch._foreach_add, Op.SUB: torch._foreach_sub, Op.MUL: torch._foreach_mul, Op.DIV: torch._foreach_div,
    Op.SQRT: torch._foreach_sqrt, Op.RSQRT: _rsqrt,
}  # fmt: skip

#: Operations of a list of arrays and a number, on either side. `torch._foreach_add` would wait for the number.
_NUMBER: Mapping[Op, Callable[..., Sequence[Tensor]]] = {
    Op.ADD: torch.ops.aten._foreach_add.Tensor, Op.MUL: torch.ops.aten._foreach_mul.Tensor,
}  # fmt: skip


def together(op: Op, operands: Sequence[Sequence[Any]]) -> Sequence[Tensor] | None:
    """The results for several lists of operands in one call; None where they are not computed so."""
    if op not in _ARRAYS or len(operands) < 2:
        return None
    columns = [*zip(*operands, strict=True)]
    arrays = [column for column in columns if column[0].dim()]
    numbers = [column[0] for column in columns if all(x is column[0] for x in column) and not column[0].dim()]
    if not arrays or len(arrays) + len(numbers) < len(columns) or not _in_one_launch(arrays):
        return None
    if not numbers:
        return _ARRAYS[op](*map(list, arrays))
    if op not in _NUMBER or len(numbers) > 1:
        return None
    return _NUMBER[op]([*arrays[0]], numbers[0].to(arrays[0][0].dtype))


def _in_one_launch(columns: Sequence[Sequence[Tensor]]) -> bool:
    """Whether all arrays are of one floating dtype, and the operands of each result lie in memory alike."""
    dtype = columns[0][0].dtype
    return dtype.is_floating_point and all(
        x.dtype is dtype and x.dim() and x.shape == first.shape and x.is_contiguous()
        for first, *others in zip(*columns, strict=True)
        for x in (first, *others)
    )
