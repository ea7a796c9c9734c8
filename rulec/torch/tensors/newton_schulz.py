"""What each owner of a piece of a matrix computes in `newton_schulz`, by the operations of torch.optim.Muon.

The choice of products of `newton_schulz` on a device: by a backend's kernels where it has them, else by torch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.array_api.matrix import times
from rulec.backend.capabilities import QuinticKernels, QuinticProducts
from rulec.errors import BackendUnsupported
from rulec.language.expr.static import NORM, UNDIVIDED
from rulec.torch.tensors.fake import has_no_memory
from rulec.torch.tensors.matrix import addmm
from rulec.torch.tensors.products import TORCH


class TorchQuintic:
    """The quintic iteration on pieces `(rows, cols)` with all rows of their matrices, as tensors of one dtype.

    Products over all columns of a matrix are sums over its pieces. These are computed and added in float32, and rounded
    once, as the sums in one product are.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = getattr(torch, dtype)
        self._wide = torch.float64 if dtype == "float64" else torch.float32

    def begin(self, x: Any) -> Tensor:
        """A piece from an array of the library."""
        tensor = x if isinstance(x, Tensor) else torch.from_numpy(np.ascontiguousarray(x))
        return tensor.to(self._dtype)

    def end(self, y: Tensor, like: Any) -> Any:
        """A piece as an array of the kind and dtype of another."""
        if isinstance(like, Tensor):
            return y.to(like.dtype)
        return y.to(torch.from_numpy(like[:0].copy()).dtype).numpy()

    def blank(self, like: Any, count: int) -> Tensor:
        """A vector of so many elements without a meaning, where the arrays of the library are."""
        return self.begin(like).new_empty(count)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Tensors one below the other."""
        return torch.cat([*parts])

    def squares(self, y: Tensor) -> Tensor:
        """The sum of squares, a vector of one number in float64."""
        return y.to(self._wide).square().sum(dtype=torch.float64).reshape(1)

    def divided(self, y: Tensor, squares: Tensor, normalize: str | float = NORM) -> Tensor:
        """The piece over the norm of its matrix, which has this sum of squares, as `normalize` says."""
        return y if normalize == UNDIVIDED else y / times(squares.sqrt().to(self._dtype).clamp(min=1e-7), normalize)

    def gram(self, y: Tensor) -> Tensor:
        """The products of the piece's rows, not rounded."""
        if y.is_cuda and self._dtype in (torch.bfloat16, torch.float16):
            return torch.mm(y, y.T, out_dtype=torch.float32)
        return y.to(self._wide) @ y.to(self._wide).T

    def added(self, sums: Sequence[Tensor]) -> Tensor:
        """Sums of several pieces, added in their order and rounded."""
        first, *others = sums
        for other in others:
            first = first + other
        return first.to(self._dtype)

    def polynomial(self, rows: Tensor, gram: Tensor, b: float, c: float) -> Tensor:
        """Rows of the polynomial, from rows of the Gram matrix and the whole of it."""
        return addmm(rows, rows, gram, beta=b, alpha=c, piece=True)

    def following(self, y: Tensor, polynomial: Tensor, a: float) -> Tensor:
        """The piece after one step."""
        return addmm(y, polynomial, y, beta=a, piece=True)


class ProductsBy:
    """The choice between a backend's products and torch's."""

    def __init__(self, kernels: QuinticKernels | None) -> None:
        """`kernels` are the backend's; None where it has none."""
        self._of = functools.cache(functools.partial(_quintic, kernels))

    def __call__(self, y: Tensor) -> QuinticProducts:
        """The products for a stack."""
        dtype = str(y.dtype).removeprefix("torch.")
        return TORCH if has_no_memory(y) else self.of(dtype, *y.shape[-2:]) or TORCH

    def of(self, dtype: str, rows: int, cols: int) -> QuinticProducts | None:
        """The backend's products for matrices of this size, in a dtype; None where torch's are taken."""
        products = self._of(dtype)
        return products if products is not None and products.pays(rows, cols) else None


def _quintic(kernels: QuinticKernels | None, dtype: str) -> QuinticProducts | None:
    if kernels is None:
        return None
    try:
        return kernels.build_quintic(dtype, kernels.emit_quintic(dtype))
    except BackendUnsupported:
        return None
