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
    """The quintic iteration in the dtype asked for, as in `rulec.compiler.matrix`."""
    a, b, c = _COEFFICIENTS
    y = _tensor(x).to(getattr(torch, dtype))
    tall = y.shape[-2] > y.shape[-1]
    y = y.mT if tall else y
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(int(steps)):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    y = y.mT if tall else y
    found: Array = y.to(torch.from_numpy(x[:0]).dtype).contiguous().numpy()
    return found


#: The matrix functions: products by torch, decompositions by LAPACK through NumPy, which torch's would call too.
TORCH_MATRIX: Mapping[Op, Callable[..., Any]] = {
    **NUMPY_MATRIX, Op.MATMUL: _matmul, Op.NEWTON_SCHULZ: _newton_schulz
}  # fmt: skip
