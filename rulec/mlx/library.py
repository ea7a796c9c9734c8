"""What is worked out between the stages of a step on MLX's arrays: every function gives new ones."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from rulec.compiler import random
from rulec.compiler.matrix import iterations, leading
from rulec.compiler.reductions import REDUCTIONS
from rulec.errors import BackendUnsupported, InternalError, TensorError
from rulec.language.node import Op

words = importlib.import_module("rulec_backends.mlx.words")


def number(value: Any) -> Any:
    """A float64 array of a number or an array."""
    return value.astype(mx.float64) if isinstance(value, mx.array) else mx.array(value, mx.float64)


def _is_real(x: Any) -> bool:
    return isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating)


def _meeting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Numbers take the dtype of the arrays that they meet."""

    @functools.wraps(function)
    def met(*operands: Any) -> Any:
        wide = [x.dtype for x in operands if _is_real(x) and x.ndim]
        arrays = [x if isinstance(x, mx.array) else number(x) for x in operands]
        if not wide:
            return function(*arrays)
        dtype = mx.float64 if mx.float64 in wide else mx.float32
        return function(*(x.astype(dtype) if _is_real(x) and not x.ndim else x for x in arrays))

    return met


def _erf(x: Any) -> Any:
    raise BackendUnsupported("mlx", "erf, of which MLX has three digits", "this rule")


def _truth(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: function(*(x != 0 for x in operands))


_OWN: Mapping[Op, Callable[..., Any]] = {
    Op.ADD: mx.add, Op.SUB: mx.subtract, Op.MUL: mx.multiply, Op.DIV: mx.divide, Op.POW: mx.power,
    Op.MOD: words.mod, Op.FLOORDIV: lambda a, b: mx.floor(a / b), Op.NEG: mx.negative,
    Op.LT: mx.less, Op.LE: mx.less_equal, Op.GT: mx.greater, Op.GE: mx.greater_equal, Op.EQ: mx.equal,
    Op.NE: mx.not_equal, Op.AND: _truth(mx.logical_and), Op.OR: _truth(mx.logical_or), Op.NOT: _truth(mx.logical_not),
    Op.WHERE: lambda c, a, b: mx.where(c != 0, a, b), Op.SQRT: mx.sqrt, Op.RSQRT: lambda x: 1 / mx.sqrt(x),
    Op.CBRT: words.cbrt, Op.ABS: mx.abs, Op.SIGN: words.sign, Op.EXP: words.exp, Op.LOG: mx.log, Op.TANH: mx.tanh,
    Op.SIGMOID: words.sigmoid, Op.ERF: _erf, Op.FLOOR: mx.floor, Op.ISFINITE: mx.isfinite,
    Op.MINIMUM: mx.minimum, Op.MAXIMUM: mx.maximum,
}  # fmt: skip


def _transpose(x: Any) -> Any:
    return mx.swapaxes(x, -1, -2)


def _newton_schulz(x: Any, steps: Any, dtype: str) -> Any:
    """The quintic iteration in the dtype asked for; a product and what is added to it are rounded together."""
    a, b, c = 3.4445, -4.7750, 2.0315
    narrow = getattr(mx, dtype)
    tall = x.shape[-2] > x.shape[-1]
    y = x.astype(narrow)
    y = _transpose(y) if tall else y
    norm = mx.sqrt(mx.sum(mx.square(y.astype(x.dtype)), axis=(-2, -1), keepdims=True)).astype(narrow)
    y = (y / mx.maximum(norm, mx.array(1e-7, narrow))).astype(x.dtype)
    for _ in range(iterations(float(steps))):
        gram = (y @ _transpose(y)).astype(narrow).astype(x.dtype)
        polynomial = (b * gram + c * (gram @ gram)).astype(narrow).astype(x.dtype)
        y = (a * y + polynomial @ y).astype(narrow).astype(x.dtype)
    return _transpose(y) if tall else y


def _where_finite(compute: Callable[..., Any]) -> Callable[..., Any]:
    """LAPACK gives anything where a matrix has NaN or infinity: give NaN."""

    def guarded(x: Any, *numbers: Any) -> Any:
        finite = mx.all(mx.isfinite(x), axis=(-2, -1), keepdims=True)
        found = compute(mx.where(finite, x, mx.zeros_like(x)), *numbers)
        return mx.where(finite, found, mx.full((), math.nan, x.dtype)).astype(x.dtype)

    return guarded


def _signed(vectors: Any) -> Any:
    """The same columns, each with its largest component positive."""
    largest = mx.argmax(mx.abs(vectors), axis=-2, keepdims=True)
    return mx.where(mx.take_along_axis(vectors, largest, axis=-2) < 0, -vectors, vectors)


def _qr(x: Any) -> Any:
    """The orthogonal factor that belongs to a triangular one without negative diagonal elements."""
    if x.shape[-2] < x.shape[-1]:
        sides = f"{x.shape[-2]} by {x.shape[-1]}"
        raise TensorError(f"qr needs at least as many rows as columns, and was given {sides}: transpose the matrix")
    orthogonal, triangular = mx.linalg.qr(x)
    diagonal = mx.diagonal(triangular, axis1=-2, axis2=-1)[..., None, :]
    return mx.where(diagonal < 0, -orthogonal, orthogonal)


def _singular_vectors(x: Any, rank: Any) -> Any:
    return _signed(mx.linalg.svd(x)[0][..., : leading(float(rank), x)])


def _inverse_root(x: Any, order: Any, eps: Any = 0) -> Any:
    lambdas, vectors = mx.linalg.eigh(x)
    order, eps = (number(value).astype(x.dtype) for value in (order, eps))
    raised = mx.maximum(lambdas[..., None, :], 0) + eps
    return (vectors * raised ** (-1 / order)) @ _transpose(vectors)


class MlxLibrary:
    """mx on arrays and on what stands for them under `mx.compile`, in float64 on the CPU's stream."""

    arithmetic: Mapping[Op, Callable[..., Any]] = {op: _meeting(function) for op, function in _OWN.items()}
    matrix: Mapping[Op, Callable[..., Any]] = {
        Op.MATMUL: mx.matmul, Op.TRANSPOSE: _transpose, Op.NEWTON_SCHULZ: _newton_schulz, Op.QR: _where_finite(_qr),
        Op.EIGH: _where_finite(lambda x: _signed(mx.linalg.eigh(x)[1])),
        Op.SINGULAR_VECTORS: _where_finite(_singular_vectors), Op.INVERSE_ROOT: _where_finite(_inverse_root),
    }  # fmt: skip

    def constant(self, value: float) -> Any:
        """A float64 number."""
        return mx.array(value, mx.float64)

    def numbers(self, values: Any) -> Any:
        """The same array."""
        return values if isinstance(values, mx.array) else number(values)

    def read(self, array: Any) -> Any:
        """The array, or in float32 one of 16 bits."""
        return array if array.dtype in (mx.float32, mx.float64) else array.astype(mx.float32)

    def write(self, array: Any, values: Any) -> None:
        """MLX's arrays are not written here."""
        raise InternalError("arrays of MLX are not written")

    def cast(self, values: Any, dtype: str) -> Any:
        """Values in another dtype."""
        return self.numbers(values).astype(getattr(mx, dtype))

    def copy(self, values: Any) -> Any:
        """The same: what is never written need not be copied."""
        return values

    def spread(self, values: Any, shape: tuple[int, ...]) -> Any:
        """Values broadcast to a shape."""
        return mx.broadcast_to(values, shape)

    def at(self, values: Any, i: int) -> Any:
        """A 0-d array."""
        return values[i] if values.ndim else values

    def take(self, values: Any, places: Any) -> Any:
        """The numbers at these places."""
        return values[mx.array(np.asarray(places))]

    def together(self, numbers: Sequence[Any]) -> Any:
        """One array of all."""
        return mx.stack([number(x).reshape(()) for x in numbers])

    def stack(self, matrices: Sequence[Any]) -> Any:
        """One after the other."""
        return mx.concatenate([*matrices])

    def split(self, matrices: Any, count: int) -> Sequence[Any]:
        """The parts."""
        return list(mx.split(matrices, count))

    def reduce(self, op: Op, values: Any, axes: tuple[int, ...] | None = None) -> Any:
        """In float64."""
        wide = number(values)
        kept = tuple(1 if axes is None or i in axes else size for i, size in enumerate(wide.shape))
        if not wide.size:
            return mx.full(() if axes is None else kept, REDUCTIONS[op].nothing, mx.float64)
        function = {Op.SUM: mx.sum, Op.MIN: mx.min, Op.MAX: mx.max}[op]
        return wide if axes == () else function(wide, axis=axes, keepdims=axes is not None)

    def random(self, op: Op, count: int, position: Mapping[str, Any], block: int = 0) -> Any:
        """The language's words in integers of 64 bits, and what is made of them in float64."""
        normal = op is Op.NORMAL
        drawn = self._words(count + count % 2 if normal else count, block, **position)
        uniform = ((drawn >> 9).astype(mx.float64) + 0.5) * 2.0**-23
        if not normal:
            return uniform
        u = uniform.reshape(-1, 2)
        radius, angle = mx.sqrt(-2.0 * mx.log(u[:, 0])), 2.0 * math.pi * u[:, 1]
        return mx.stack([radius * mx.cos(angle), radius * mx.sin(angle)], axis=-1).reshape(-1)[:count]

    def _words(self, count: int, first: int, *, seed: int, tensor: int, draw: int, step: Any) -> Any:
        def word(value: Any) -> Any:
            return value.astype(mx.uint64) if isinstance(value, mx.array) else mx.array(int(value), mx.uint64)

        mask = word(random.WORD)
        block, at = word(mx.arange((count + 3) // 4)) + word(first), word(step)
        counter = (block & mask, block >> word(32), word(draw), at & mask)
        made = random.rounds(counter, (int(seed) & random.WORD, int(tensor) & random.WORD))
        return mx.stack([mx.broadcast_to(x, block.shape) for x in made], axis=-1).reshape(-1)[:count]

    def hold(self, thing: Any) -> None:
        """MLX keeps what it needs."""


LIBRARY = MlxLibrary()
