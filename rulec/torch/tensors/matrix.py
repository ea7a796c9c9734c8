"""Matrix functions by torch, on NumPy arrays `(batch, rows, cols)` that share memory with tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.array_api.matrix import blockwise, matrix_functions
from rulec.array_api.newton_schulz import bound, factor, is_bound, iterations, times
from rulec.array_api.numpy import NumpyFunctions
from rulec.language.expr.newton_schulz import Coefficients, coefficients_of, in_blocks, iterated_in
from rulec.language.expr.node import Op
from rulec.language.expr.static import DIRECT, GRAM, MUON, NORM, UNDIVIDED, Normalize

Array = np.ndarray[Any, Any]

#: From so many multiplications on, a product of 16-bit matrices in float32 is quicker than a loop over elements.
_WORTH_WIDENING = 2**18

#: From so many rows on, copying a quarter of a symmetric product is quicker than computing it: by instructions for 16
#: bits, and in float32 or float64.
_WORTH_HALVING, _WORTH_HALVING_WIDE = 256, 1024


class _Functions(NumpyFunctions):
    """Products and decompositions of NumPy's arrays by torch, in their own dtype and its threads.

    NumPy decomposes in float64, and its threads would wait beside torch's.
    """

    def matmul(self, a: Array, b: Array) -> Array:
        if a.shape[-2] >= _WORTH_HALVING_WIDE and _is_transposed(a, b):
            return np.stack([gram(y).numpy() for y in _tensor(a)])
        product: Array = torch.matmul(_tensor(a), _tensor(b)).numpy()
        return product

    def qr(self, x: Array) -> tuple[Array, Array]:
        orthogonal, triangular = torch.linalg.qr(_tensor(x))
        return orthogonal.numpy(), triangular.numpy()

    def eigh(self, x: Array) -> tuple[Array, Array]:
        lambdas, vectors = torch.linalg.eigh(_tensor(x))
        return lambdas.numpy(), vectors.numpy()


def _is_transposed(a: Array, b: Array) -> bool:
    """Whether the second stack has the memory of the first, with rows as columns."""
    return a.ctypes.data == b.ctypes.data and a.shape == b.mT.shape and a.strides == b.mT.strides and a.size > 0


def _tensor(x: Array) -> Tensor:
    """A tensor that shares the memory of the array, or has a copy of one that is read-only or has a negative stride."""
    return torch.from_numpy(x if x.flags.writeable and min(x.strides, default=0) >= 0 else x.copy())


def _newton_schulz(
    x: Array, steps: float, dtype: str | None, coefficients: str | Coefficients = MUON, normalize: Normalize = NORM,
    form: str = DIRECT,
) -> Array:  # fmt: skip
    """The quintic iteration matrix by matrix, in the direct form operation by operation as in torch.optim.Muon.

    It is in the dtype asked for, or else in that of the matrices.
    """
    matrices = _tensor(x)
    blocks = in_blocks(coefficients_of(coefficients, iterations(steps)), form, *x.shape[-2:])
    results = torch.empty_like(matrices)
    for matrix, into in zip(matrices, results, strict=True):
        y = matrix if dtype is None else matrix.to(getattr(torch, dtype))
        inside = y.dtype if dtype is None else getattr(torch, str(iterated_in(dtype, form)))
        into.copy_(_orthogonalized(y, blocks, normalize, inside, exact=form == GRAM).to(y.dtype))
    array: Array = results.numpy()
    return array


def _orthogonalized(
    y: Tensor, blocks: Sequence[Coefficients], normalize: Normalize, dtype: torch.dtype, exact: bool
) -> Tensor:
    """The matrix after some blocks of iterations in a dtype.

    An `exact` norm is summed in float64, in which the order of the elements in memory has no effect.
    """
    tall = y.shape[0] > y.shape[1]
    y = y.T if tall else y
    if exact:
        y = y.to(torch.promote_types(y.dtype, torch.float32))
    if normalize != UNDIVIDED:
        norm = y.double().norm().to(y.dtype) if exact else y.norm()
        y = y / times(norm.clamp(min=1e-7), normalize)
    y = (divided_by_bound(y, normalize) if is_bound(normalize) else y).to(dtype)
    for block in blocks:
        matrix, a, _ = factor(gram(y), block, HOST)
        y = addmm(y, matrix, y, beta=a)
    return y.T if tall else y


class _Sizes:
    """The functions of tensors that bounds of singular values need."""

    def at_least(self, x: Tensor, least: float) -> Tensor:
        """The larger of each element and a number."""
        return x.clamp(min=least)

    def largest(self, x: Tensor) -> Tensor:
        """The largest of each column of sizes."""
        return x.amax(dim=-2, keepdim=True)


def divided_by_bound(y: Tensor, normalize: Normalize) -> Tensor:
    """Wide matrices of norm 1 over their bound, computed in float32 at least and rounded once."""
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    quotient: Tensor = wide / bound(_Sizes(), wide, lambda: wide @ wide.mT, normalize)
    return quotient.to(y.dtype)


class HostProducts:
    """Products of symmetric matrices on the CPU that commute."""

    def polynomial(self, gram: Tensor, b: float, c: float, out: Any = None) -> Tensor:
        """`b*x + c*x @ x`."""
        return polynomial(gram, b, c)

    def multiplied(self, x: Tensor, polynomial: Tensor, a: float, out: Any = None) -> Tensor:
        """`a*x + x @ p`."""

        def write(rows: slice, cols: slice, out: Tensor) -> Tensor:
            return addmm(x[rows, cols], x[rows], polynomial[:, cols], beta=a, out=out)

        return _symmetric(x.shape[0], x.dtype, write)

    def shifted(self, x: Tensor, a: float) -> Tensor:
        """`a + x` on the diagonal, in place."""
        x.diagonal().add_(a)
        return x


HOST = HostProducts()


def addmm(
    y: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0, out: Tensor | None = None, piece: bool = False
) -> Tensor:  # fmt: skip
    """`beta*y + alpha*a @ b` of matrices of one dtype, summed in float32 where they have 16 bits, and rounded once.

    A `piece` of a matrix is computed as the whole, that is large enough.
    """
    if not _widens(a, b, 0 if piece else _WORTH_WIDENING):
        return torch.addmm(y, a, b, beta=beta, alpha=alpha, out=out)
    product = torch.addmm(y.float(), a.float(), b.float(), beta=beta, alpha=alpha)
    return product.to(y.dtype) if out is None else out.copy_(product)


def _mm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    return out.copy_(a.float() @ b.float()) if _widens(a, b) else torch.mm(a, b, out=out)


def _widens(a: Tensor, b: Tensor, least: int = _WORTH_WIDENING) -> bool:
    """Whether the product, of so many multiplications at least, is computed from float32 copies.

    On a processor without instructions for 16-bit numbers torch multiplies them in a loop over elements, which takes
    twenty times as long for large matrices as copies and their product. Its sums have another order.
    """
    return a.device.type == "cpu" and a.shape[0] * b.numel() >= least and not multiplies(a.dtype)


def gram(y: Tensor) -> Tensor:
    """The product of a matrix and its transpose."""
    return _symmetric(y.shape[0], y.dtype, lambda rows, cols, out: _mm(y[rows], y[cols].T, out))


def polynomial(x: Tensor, b: float, c: float) -> Tensor:
    """`b*x + c*x @ x` of a symmetric matrix."""

    def write(rows: slice, cols: slice, out: Tensor) -> Tensor:
        return addmm(x[rows, cols], x[rows], x[:, cols], beta=b, alpha=c, out=out)

    return _symmetric(x.shape[0], x.dtype, write)


def _symmetric(size: int, dtype: torch.dtype, write: Callable[[slice, slice, Tensor], Tensor]) -> Tensor:
    """A symmetric matrix of which `write` computes some rows and columns; of a large one a quarter is only copied.

    An element and its mirror image are sums of the same products in the same order: the copied quarter has the same
    bits as a computed one. With tiles the order of a sum depends on the number of rows, and a matrix is computed whole:
    its bits are those of one product, and it is quicker.
    """
    matrix = torch.empty(size, size, dtype=dtype, device="cpu")
    least = _WORTH_HALVING if dtype.itemsize == 2 and multiplies(dtype) else _WORTH_HALVING_WIDE
    if size < least or (dtype == torch.bfloat16 and _has_tiles()):
        return write(slice(None), slice(None), matrix)
    half = size // 2
    write(slice(half, None), slice(None), matrix[half:])
    matrix[:half, :half] = write(slice(half), slice(half), torch.empty(half, half, dtype=dtype, device="cpu"))
    matrix[:half, half:] = matrix[half:, :half].T
    return matrix


@functools.cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of this dtype by instructions of the processor, not element by element."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    return name is None or bool(getattr(torch.ops.mkldnn, name, lambda: True)())


@functools.cache
def _has_tiles() -> bool:
    """Whether the processor multiplies tiles of bfloat16 (AMX); False where this torch does not know."""
    capabilities: Callable[[], Mapping[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)
    return bool(capabilities().get("amx_bf16", False))


#: The matrix functions.
TORCH_MATRIX: Mapping[Op, Callable[..., Any]] = blockwise(
    _Functions(np), {**matrix_functions(_Functions(np)), Op.NEWTON_SCHULZ: _newton_schulz}
)
