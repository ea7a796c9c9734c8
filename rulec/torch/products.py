"""The products of `newton_schulz` for stacks on a device: by a backend's kernels where it has them, else by torch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rulec.backend.quintic import QuinticProducts
from rulec.errors import BackendUnsupported
from rulec.torch.fake import has_no_memory


class TorchProducts:
    """By torch, the operations of torch.optim.Muon on a whole stack. Tall matrices are seen transposed."""

    def pays(self, rows: int, cols: int) -> bool:
        """For all sizes."""
        return True

    def gram(self, y: Tensor) -> Tensor:
        """The products of matrices and their transposes."""
        wide = _wide(y)
        return torch.bmm(wide, wide.mT)

    def polynomial(self, gram: Tensor, b: float, c: float) -> Tensor:
        """`b*x + c*x @ x`."""
        return torch.baddbmm(gram, gram, gram, beta=b, alpha=c)

    def following(self, y: Tensor, polynomial: Tensor, a: float) -> Tensor:
        """`a*y + x @ y`, of tall matrices in the memory order of their transposes."""
        wide = _wide(y)
        result = torch.baddbmm(wide, polynomial, wide, beta=a)
        return result if wide is y else result.mT


def _wide(y: Tensor) -> Tensor:
    return y.mT if y.shape[-2] > y.shape[-1] else y


TORCH = TorchProducts()


class ProductsBy:
    """The choice between a backend's products and torch's."""

    def __init__(self, backend: Any) -> None:
        """`backend` may be any, and None."""
        self._of = functools.cache(functools.partial(_quintic, backend))

    def __call__(self, y: Tensor) -> QuinticProducts:
        """The products for a stack."""
        dtype = str(y.dtype).removeprefix("torch.")
        return TORCH if has_no_memory(y) else self.of(dtype, *y.shape[-2:]) or TORCH

    def of(self, dtype: str, rows: int, cols: int) -> QuinticProducts | None:
        """The backend's products for matrices of this size, in a dtype; None where torch's are taken."""
        products = self._of(dtype)
        return products if products is not None and products.pays(rows, cols) else None


def _quintic(backend: Any, dtype: str) -> QuinticProducts | None:
    if not hasattr(backend, "build_quintic"):
        return None
    try:
        products: QuinticProducts = backend.build_quintic(dtype, backend.emit_quintic(dtype))
    except BackendUnsupported:
        return None
    return products
