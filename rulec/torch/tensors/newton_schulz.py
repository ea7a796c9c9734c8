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

from rulec.array_api.newton_schulz import factor, is_bound, iterations, times
from rulec.backend.capabilities import QuinticKernels, QuinticProducts
from rulec.errors import BackendUnsupported
from rulec.language.expr.newton_schulz import Coefficients, coefficients_of, in_blocks, iterated_in
from rulec.language.expr.static import DIRECT, GRAM, MUON, NORM, UNDIVIDED, Normalize
from rulec.torch.products import TORCH
from rulec.torch.tensors.fake import has_no_memory
from rulec.torch.tensors.matrix import HOST, addmm, divided_by_bound


class TorchQuintic:
    """The quintic iteration on pieces `(rows, cols)` with all rows of their matrices, as tensors of one dtype.

    Products over all columns of a matrix are sums over its pieces. These are computed and added in float32, and rounded
    once, as the sums in one product are. In the `gram` form a piece is divided in float32, and then iterated.
    """

    def __init__(self, dtype: str, form: str = DIRECT) -> None:
        self._operand, self._dtype = getattr(torch, dtype), getattr(torch, str(iterated_in(dtype, form)))
        self._wide = torch.float64 if dtype == "float64" else torch.float32
        self._norms = self._wide if form == GRAM else self._dtype

    def begin(self, x: Any) -> Tensor:
        """A piece from an array of the library."""
        tensor = x if isinstance(x, Tensor) else torch.from_numpy(np.ascontiguousarray(x))
        return tensor.to(self._operand)

    def end(self, y: Tensor, like: Any) -> Any:
        """A piece as an array of the kind and dtype of another."""
        y = y.to(self._operand)
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
        if normalize != UNDIVIDED:
            y = y.to(self._norms) / times(squares.sqrt().to(self._norms).clamp(min=1e-7), normalize)
        return y.to(self._dtype)

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

    def factor(self, gram: Tensor, block: Coefficients) -> tuple[Tensor, float]:
        """The symmetric matrix of several steps and the share of a piece itself, from the Gram matrix before them."""
        if gram.device.type == "cpu":
            return factor(gram, block, HOST)[:2]
        matrix, a, _ = factor(gram[None], block, StackProducts(TORCH))
        return matrix[0], a

    def following(self, y: Tensor, polynomial: Tensor, a: float) -> Tensor:
        """The piece after one step, or after several."""
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


class StackProducts:
    """Products of stacks of symmetric matrices that commute, by a backend's kernels or torch's."""

    def __init__(self, by: QuinticProducts) -> None:
        self.polynomial, self.multiplied = by.polynomial, by.multiplied

    def shifted(self, x: Tensor, a: float) -> Tensor:
        """`a + x` on the diagonals, in place."""
        x.diagonal(dim1=-2, dim2=-1).add_(a)
        return x


def newton_schulz(
    x: Tensor, steps: float, dtype: str | None, coefficients: str | Coefficients = MUON, normalize: Normalize = NORM,
    form: str = DIRECT, products: Callable[[Tensor], QuinticProducts] = lambda y: TORCH,
) -> Tensor:  # fmt: skip
    """The quintic iteration in the dtype asked for or the stack's own, on all of it, by the `products` chosen for it.

    Iterations take turns in the memory of two stacks, and share that of the symmetric matrices. torch's products of
    tall matrices are of their transposes, which are views.
    """
    operand = x if dtype is None else x.to(getattr(torch, dtype))
    inside = operand.dtype if dtype is None else getattr(torch, str(iterated_in(dtype, form)))
    y = operand if form == DIRECT else operand.new_empty(operand.shape, dtype=inside)
    by = products(y)
    if normalize != UNDIVIDED:
        exact = None if form == DIRECT else torch.promote_types(operand.dtype, torch.float32)
        norm = torch.linalg.vector_norm(operand, dim=(-2, -1), keepdim=True, dtype=exact).clamp(min=1e-7)
        y = by.divided(operand, times(norm, normalize), out=None if y is operand else y)
    elif y is not operand:
        y.copy_(operand)
    if is_bound(normalize):
        tall = x.shape[-2] > x.shape[-1]
        y = divided_by_bound(y.mT, normalize).mT.contiguous() if tall else divided_by_bound(y, normalize)
    turned = by is TORCH and x.shape[-2] > x.shape[-1]
    y = y.mT if turned else y
    gram, last, rooms = None, None, (None, None)
    for block in in_blocks(coefficients_of(coefficients, iterations(steps)), form, *x.shape[-2:]):
        matrix, a, (gram, room) = factor(by.gram(y, out=gram), block, StackProducts(by), rooms)
        y, last, rooms = by.following(y, matrix, a, out=last), y, (matrix, room)
    return (y.mT if turned else y).to(operand.dtype).to(x.dtype)
