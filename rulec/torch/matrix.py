"""Matrix functions by torch, on NumPy arrays `(batch, rows, cols)` that share memory with tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.language.node import Op
from rulec.runtime.matrix import NUMPY_MATRIX

Array = np.ndarray[Any, Any]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def _matmul(a: Array, b: Array) -> Array:
    found: Array = torch.matmul(_tensor(a), _tensor(b)).numpy()
    return found


def _tensor(x: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def _newton_schulz(x: Array, steps: float, dtype: str) -> Array:
    """The quintic iteration in the dtype asked for, matrix by matrix, operation by operation as in torch.optim.Muon."""
    given = _tensor(x)
    made = torch.empty_like(given)
    for matrix, into in zip(given, made, strict=True):
        into.copy_(_orthogonalized(matrix.to(getattr(torch, dtype)), int(steps)))
    found: Array = made.numpy()
    return found


def _orthogonalized(y: Tensor, steps: int) -> Tensor:
    a, b, c = _COEFFICIENTS
    tall = y.shape[0] > y.shape[1]
    y = y.T if tall else y
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.T if tall else y


#: The matrix functions: products by torch, decompositions by LAPACK through NumPy, which torch's would call too.
TORCH_MATRIX: Mapping[Op, Callable[..., Any]] = {
    **NUMPY_MATRIX, Op.MATMUL: _matmul, Op.NEWTON_SCHULZ: _newton_schulz
}  # fmt: skip
