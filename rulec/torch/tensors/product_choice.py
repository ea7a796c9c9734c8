"""The choice of products of `newton_schulz` on a device: by a backend's kernels where it has them, else by torch."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from rulec.backend.quintic import QuinticProducts
from rulec.errors import BackendUnsupported
from rulec.torch.tensors.fake import has_no_memory
from rulec.torch.tensors.products import TORCH


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
