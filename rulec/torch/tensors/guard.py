"""Whether tensors look exactly as others did: in one call of torch's, for as many as there are.

Asking each of a thousand gradients for its dtype, size and order takes longer than a small kernel. torch's compiler
has a function that asks them all; where torch has it no more, or it says no, they are asked one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Guard = Callable[..., bool]


def guard_for(tensors: Sequence[Tensor]) -> Guard:
    """A function of tensors, its arguments: true where they have the same types, dtypes, devices, sizes, strides and
    dispatch keys as these (sparse, conjugate and negated ones have others). False may mean nothing.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [[*t.size()] for t in tensors]
        strides: Any = [[*t.stride()] for t in tensors]
        check: Guard = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except (ImportError, TypeError, RuntimeError):
        return never
    return check


def never(*tensors: Tensor) -> bool:
    """True of nothing."""
    return False
