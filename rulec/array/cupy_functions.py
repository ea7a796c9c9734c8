"""The operations of the language on CuPy arrays: `rulec.language.arithmetic` and `rulec.compiler.matrix` define them.

Numbers known here are NumPy's or Python's: CuPy passes them to kernels as arguments, and they take the dtype of the
arrays they meet; so do numbers on the device.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rulec.compiler.matrix import iterations, leading
from rulec.errors import TensorError
from rulec.language.arithmetic import NUMPY
from rulec.language.node import Op

Table = Mapping[Op, Callable[..., Any]]


@functools.cache
def arithmetic() -> Table:
    """The elementwise operations."""
    import cupy as cp

    plain = {
        Op.ADD: cp.add, Op.SUB: cp.subtract, Op.MUL: cp.multiply, Op.DIV: cp.divide, Op.POW: cp.power, Op.MOD: _modulo,
        Op.FLOORDIV: lambda a, b: cp.floor(cp.divide(a, b)), Op.NEG: cp.negative,
        Op.LT: cp.less, Op.LE: cp.less_equal, Op.GT: cp.greater, Op.GE: cp.greater_equal, Op.EQ: cp.equal,
        Op.NE: cp.not_equal, Op.AND: cp.logical_and, Op.OR: cp.logical_or, Op.NOT: cp.logical_not,
        Op.WHERE: lambda c, a, b: cp.where(c != 0, a, b), Op.SQRT: cp.sqrt, Op.RSQRT: lambda x: 1 / cp.sqrt(x),
        Op.CBRT: cp.cbrt, Op.ABS: cp.abs, Op.SIGN: lambda x: cp.where(cp.isnan(x), x, cp.sign(x)),
        Op.EXP: cp.exp, Op.LOG: cp.log, Op.TANH: cp.tanh, Op.SIGMOID: _sigmoid, Op.ERF: _erf, Op.FLOOR: cp.floor,
        Op.ISFINITE: cp.isfinite, Op.MINIMUM: cp.minimum, Op.MAXIMUM: cp.maximum,
    }  # fmt: skip
    return {op: _on_device(op, function) for op, function in plain.items()}


def _on_device(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    """The operation on the device, or here where all operands are known here."""
    import cupy

    def apply(*operands: Any) -> Any:
        there = [x for x in operands if isinstance(x, cupy.ndarray)]
        if not there:
            return NUMPY[op](*operands)
        floats = [x.dtype for x in there if x.ndim and x.dtype.kind == "f"]
        dtype = np.result_type(*floats) if floats else None
        return function(*(_fitted(x, dtype) for x in operands))

    return apply


def _fitted(x: Any, dtype: Any) -> Any:
    """A number in the dtype of the arrays it meets."""
    if isinstance(x, np.generic):
        return x.item()
    if dtype is not None and getattr(x, "ndim", 1) == 0 and x.dtype.kind == "f":
        return x.astype(dtype, copy=False)
    return x


def _modulo(a: Any, b: Any) -> Any:
    """What is left of a division rounded down, without rounding, with the sign of `b`."""
    import cupy as cp

    rest = cp.fmod(a, b)
    turned = cp.where((rest < 0) != (b < 0), rest + b, rest)
    return cp.where(rest == 0, cp.copysign(rest, b), turned)


def _sigmoid(x: Any) -> Any:
    import cupy as cp

    small = cp.exp(-cp.abs(x))
    return cp.where(cp.signbit(x), small, 1.0) / (1.0 + small)


def _erf(x: Any) -> Any:
    return importlib.import_module("cupyx.scipy.special").erf(x)


@functools.cache
def matrix() -> Table:
    """The matrix functions, on stacks `(batch, rows, cols)`."""
    import cupy

    return {
        Op.MATMUL: cupy.matmul,
        Op.TRANSPOSE: _transposed,
        Op.NEWTON_SCHULZ: _newton_schulz,
        Op.QR: _where_finite(_qr),
        Op.EIGH: _where_finite(_eigh),
        Op.SINGULAR_VECTORS: _where_finite(_singular_vectors),
        Op.INVERSE_ROOT: _where_finite(_inverse_root),
    }


def _transposed(x: Any) -> Any:
    return x.swapaxes(-1, -2)


def _newton_schulz(x: Any, steps: float, dtype: str) -> Any:
    """The quintic iteration; in the matrix's own dtype where 16 bits are asked for."""
    import cupy as cp

    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[-2] > x.shape[-1]
    y = x.astype(dtype, copy=False) if dtype in ("float32", "float64") else x
    y = _transposed(y) if tall else y
    y = y / cp.maximum(cp.sqrt(cp.sum(y * y, axis=(-2, -1), keepdims=True)), 1e-7)
    for _ in range(iterations(steps)):
        gram = cp.matmul(y, _transposed(y))
        y = a * y + cp.matmul(b * gram + c * cp.matmul(gram, gram), y)
    return (_transposed(y) if tall else y).astype(x.dtype, copy=False)


def _where_finite(compute: Callable[..., Any]) -> Callable[..., Any]:
    """The solvers fail, or give anything, where a matrix has NaN or infinity: give NaN."""
    import cupy as cp

    def guarded(x: Any, *numbers: Any) -> Any:
        finite = cp.isfinite(x).all(axis=(-2, -1), keepdims=True)
        found = compute(cp.where(finite, x, 0), *numbers)
        return cp.where(finite, found, cp.nan).astype(x.dtype, copy=False)

    return guarded


def _signed(vectors: Any) -> Any:
    """The same columns, each with its largest component positive: their signs are the algorithm's whim otherwise."""
    import cupy as cp

    if not vectors.size:
        return vectors
    largest = cp.argmax(cp.abs(vectors), axis=-2, keepdims=True)
    return cp.where(cp.take_along_axis(vectors, largest, axis=-2) < 0, -vectors, vectors)


def _qr(x: Any) -> Any:
    """The orthogonal factor that belongs to a triangular one without negative diagonal elements."""
    import cupy as cp

    if x.shape[-2] < x.shape[-1]:
        raise TensorError(f"qr needs at least as many rows as columns, and was given {_sides(x)}: transpose the matrix")
    orthogonal, triangular = cp.linalg.qr(x)
    diagonal = cp.diagonal(triangular, axis1=-2, axis2=-1)[..., None, :]
    return cp.where(diagonal < 0, -orthogonal, orthogonal)


def _eigh(x: Any) -> Any:
    import cupy as cp

    return _signed(cp.linalg.eigh(x)[1])


def _singular_vectors(x: Any, rank: float) -> Any:
    import cupy as cp

    count = leading(rank, x)
    return _signed(cp.linalg.svd(x, full_matrices=False)[0][..., :count])


def _inverse_root(x: Any, order: Any, eps: Any = 0) -> Any:
    import cupy as cp

    lambdas, vectors = cp.linalg.eigh(x)
    raised = cp.maximum(lambdas[..., None, :], 0) + eps
    return cp.matmul(vectors * raised ** (-1 / order), _transposed(vectors))


def _sides(x: Any) -> str:
    return f"{x.shape[-2]} by {x.shape[-1]}"
