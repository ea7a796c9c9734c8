"""The functions of `rulec.compiler.matrix` on stacks of torch tensors `(batch, rows, cols)`, where they are.

torch itself waits for the device in `eigh` and in singular value decompositions, to look for failures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rulec.compiler.matrix import iterations, leading
from rulec.errors import TensorError
from rulec.language.node import Op
from rulec.torch.matrix import COEFFICIENTS


def _newton_schulz(x: Tensor, steps: float, dtype: str) -> Tensor:
    """The quintic iteration in the dtype asked for, by the operations of torch.optim.Muon, on the whole stack."""
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    y = x.to(getattr(torch, dtype))
    y = y.mT if tall else y
    y = y / torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(iterations(steps)):
        gram = torch.bmm(y, y.mT)
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return (y.mT if tall else y).to(x.dtype)


def _where_finite(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """LAPACK fails, or gives anything, where a matrix has NaN or infinity: give NaN."""

    def guarded(x: Tensor, *numbers: Any) -> Tensor:
        finite = torch.isfinite(x).all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
        found = compute(torch.where(finite, x, torch.zeros_like(x)), *numbers)
        return torch.where(finite, found, torch.full_like(found, torch.nan)).to(x.dtype)

    return guarded


def _signed(vectors: Tensor) -> Tensor:
    """The same columns, each with its largest component positive: their signs are the algorithm's whim otherwise."""
    if not vectors.numel():
        return vectors
    largest = torch.argmax(torch.abs(vectors), dim=-2, keepdim=True)
    return torch.where(torch.gather(vectors, -2, largest) < 0, -vectors, vectors)


def _qr(x: Tensor) -> Tensor:
    """The orthogonal factor that belongs to a triangular one without negative diagonal elements."""
    if x.shape[-2] < x.shape[-1]:
        raise TensorError(f"qr needs at least as many rows as columns, and was given {_sides(x)}: transpose the matrix")
    orthogonal, triangular = torch.linalg.qr(x)
    diagonal = torch.diagonal(triangular, dim1=-2, dim2=-1)[..., None, :]
    return torch.where(diagonal < 0, -orthogonal, orthogonal)


def _eigh(x: Tensor) -> Tensor:
    return _signed(torch.linalg.eigh(x)[1])


def _singular_vectors(x: Tensor, rank: float) -> Tensor:
    count = leading(rank, x)
    return _signed(torch.linalg.svd(x, full_matrices=False)[0][..., :count])


def _inverse_root(x: Tensor, order: Any, eps: Any = 0) -> Tensor:
    lambdas, vectors = torch.linalg.eigh(x)
    order, eps = _in_dtype(order, x), _in_dtype(eps, x)
    raised = torch.clamp(lambdas[..., None, :], min=0) + eps
    return torch.matmul(vectors * raised ** (-1 / order), vectors.mT)


def _in_dtype(number: Any, x: Tensor) -> Any:
    """A number beside a matrix, in whose dtype it takes part where it is an array."""
    return number.to(x.dtype) if isinstance(number, Tensor) else number


def _sides(x: Tensor) -> str:
    return f"{x.shape[-2]} by {x.shape[-1]}"


#: The matrix functions.
DEVICE_MATRIX: Mapping[Op, Callable[..., Any]] = {
    Op.MATMUL: torch.matmul,
    Op.TRANSPOSE: lambda x: x.mT,
    Op.NEWTON_SCHULZ: _newton_schulz,
    Op.QR: _where_finite(_qr),
    Op.EIGH: _where_finite(_eigh),
    Op.SINGULAR_VECTORS: _where_finite(_singular_vectors),
    Op.INVERSE_ROOT: _where_finite(_inverse_root),
}
