"""Newton-Schulz iterations in torch, as torch.optim.Muon has them: of whole stacks, and of pieces of matrices.

Stacks on a device take products by a backend's kernels where it has them, else by torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.array_api.matrix import iterations, times
from rulec.backend.capabilities import QuinticKernels, QuinticProducts
from rulec.errors import BackendUnsupported
from rulec.language.expr.newton_schulz import Coefficients, coefficients_of
from rulec.language.expr.static import MUON, NORM, UNDIVIDED
from rulec.torch.products import TORCH
from rulec.torch.tensors.fake import has_no_memory
from rulec.torch.tensors.matrix import addmm


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


class ProductsChoice:
    """The choice of products for a dtype and a size: a backend's where it has some, else torch's."""

    def __init__(self, kernels: QuinticKernels | None = None) -> None:
        """`kernels` are the backend's; None where it has none."""
        self._of = functools.cache(functools.partial(_products, kernels))

    def __call__(self, y: Tensor) -> QuinticProducts:
        """The products for a stack; torch's where there is no memory to compute with."""
        return TORCH if has_no_memory(y) else self.of(str(y.dtype).removeprefix("torch."), *y.shape[-2:])

    def of(self, dtype: str, rows: int, cols: int) -> QuinticProducts:
        """The products for matrices of this size, in a dtype."""
        products = self._of(dtype)
        return products if products.pays(rows, cols) else TORCH


def _products(kernels: QuinticKernels | None, dtype: str) -> QuinticProducts:
    """A backend's products of a dtype; torch's where it has none."""
    if kernels is None:
        return TORCH
    try:
        return kernels.build_quintic(dtype, kernels.emit_quintic(dtype))
    except BackendUnsupported:
        return TORCH


def newton_schulz(
    x: Tensor, steps: float, dtype: str | None, coefficients: str | Coefficients = MUON, normalize: str | float = NORM,
    products: Callable[[Tensor], QuinticProducts] = lambda y: TORCH,
) -> Tensor:  # fmt: skip
    """The quintic iteration in the dtype asked for or the stack's own, on all of it, by the `products` chosen for it.

    Iterations take turns in the memory of two stacks, and share that of the symmetric matrices.
    """
    y = x if dtype is None else x.to(getattr(torch, dtype))
    by, gram, polynomial, last = products(y), None, None, None
    if normalize != UNDIVIDED:
        norm = torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
        y = by.divided(y, times(norm, normalize))
    for a, b, c in coefficients_of(coefficients, iterations(steps)):
        gram = by.gram(y, out=gram)
        polynomial = by.polynomial(gram, b, c, out=polynomial)
        y, last = by.following(y, polynomial, a, out=last), y
    return y.to(x.dtype)
