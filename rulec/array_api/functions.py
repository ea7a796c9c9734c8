"""The functions of an array library, under NumPy's names: the parts of operations and of matrix functions.

A library with another name or another method for one has a class of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rulec.array_api import bits, ordering, selection
from rulec.language.expr.node import Op
from rulec.language.expr.ops import having

#: Dtypes that every library multiplies matrices in.
WIDE = ("float32", "float64")


class Functions:
    """The functions of a module `xp` with NumPy's names. No function writes to its operands."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    # Arrays

    def cast(self, x: Any, dtype: Any) -> Any:
        """The array in another dtype, by its name or as the library's own; the same array where it has this dtype."""
        return x.astype(dtype, copy=False)

    def transposed(self, x: Any) -> Any:
        """The matrices with their rows as columns."""
        return self.xp.swapaxes(x, -1, -2)

    def diagonal(self, x: Any) -> Any:
        """The diagonals `(batch, n)` of matrices."""
        return self.xp.diagonal(x, axis1=-2, axis2=-1)

    def backwards(self, x: Any, axes: int) -> Any:
        """The matrices with their rows backwards; for 2 axes, the columns too."""
        return x[:, ::-1, ::-1] if axes == 2 else x[:, ::-1]

    def filled(self, condition: Any, x: Any, number: float) -> Any:
        """The array, with a number where the condition is false."""
        return self.xp.where(condition, x, number)

    def at_least(self, x: Any, least: float) -> Any:
        """The larger of each element and a number."""
        return self.xp.maximum(x, least)

    def largest(self, x: Any) -> Any:
        """The component of the largest size of each column `(batch, 1, cols)`; the first where there are several."""
        return self.xp.take_along_axis(x, self.xp.argmax(self.xp.abs(x), axis=-2, keepdims=True), axis=-2)

    def power(self, x: Any, exponent: Any) -> Any:
        """Each element to a power."""
        return x**exponent

    # Ranks

    def word(self, x: Any) -> Any:
        """The dtype of whole numbers of as many bits as the numbers of the array, float32 or float64."""
        return self.xp.int64 if x.dtype == self.xp.float64 else self.xp.int32

    def like(self, number: int, words: Any) -> Any:
        """A whole number for arithmetic with an array of whole numbers."""
        return self.xp.asarray(number, dtype=words.dtype)

    def sort(self, words: Any) -> Any:
        """Whole numbers in ascending order along the last axis."""
        return self.xp.sort(words, axis=-1)

    def order(self, words: Any) -> Any:
        """The places of whole numbers in ascending order along the last axis; of equal ones the first comes first."""
        return self.xp.argsort(words, axis=-1)

    def in_order(self, x: Any) -> Any:
        """The places of numbers in ascending order along the last axis, as `rulec.array_api.ordering` has it."""
        return ordering.in_order(self, x)

    def along(self, x: Any, places: Any) -> Any:
        """The elements at places along the last axis."""
        return self.xp.take_along_axis(x, places, axis=-1)

    def count(self, condition: Any) -> Any:
        """The number of true elements along the last axis, which stays with an extent of 1."""
        return self.xp.sum(condition, axis=-1, keepdims=True)

    def least(self, words: Any) -> Any:
        """The least whole number along the last axis, which stays with an extent of 1."""
        return self.xp.min(words, axis=-1, keepdims=True)

    def repeated(self, times: int, function: Callable[[Any], Any], start: Any) -> Any:
        """A function of its own result, so many times. A compiler may make a loop of it."""
        for _ in range(times):
            start = function(start)
        return start

    def ranked(self, x: Any, low: Any, high: Any) -> tuple[Any, Any]:
        """The elements of two ranks along the last axis, of which the second is the first or the one after it."""
        return selection.ranked(self, x, low, high)

    # Numbers beside arrays

    def is_finite(self, x: Any) -> Any:
        """Whether each element is neither infinite nor NaN."""
        return self.xp.isfinite(x)

    def is_float(self, x: Any) -> bool:
        """Whether the array is of floating-point numbers."""
        return bool(self.xp.issubdtype(x.dtype, self.xp.floating))

    def fitted(self, x: Any, dtype: Any) -> Any:
        """An operand for arithmetic with arrays of this dtype: a number in the dtype, an array unchanged."""
        return x

    def known(self, number: Any, what: str) -> Any:
        """A number that controls the computation, such as a count; an error where the library traces it."""
        return number

    def beside(self, number: Any, x: Any) -> Any:
        """A number for arithmetic with a matrix: the result has the dtype of the matrix."""
        return self.xp.asarray(number, x.dtype)

    # Products and decompositions

    def product_dtype(self, x: Any, dtype: str) -> Any:
        """The dtype to multiply matrices in, for a requested dtype: the matrices' own for one of 16 bits."""
        return dtype if dtype in WIDE else x.dtype

    def matmul(self, a: Any, b: Any) -> Any:
        """The product of matrices, in their dtype."""
        return self.xp.matmul(a, b)

    def wide(self, x: Any) -> Any:
        """The array in a dtype of at least 32 bits, in a library with products of 16 bits."""
        return x

    def wide_matmul(self, a: Any, b: Any) -> Any:
        """The product of matrices in the dtype of `wide`."""
        return self.matmul(a, b)

    def norm(self, x: Any, dtype: Any) -> Any:
        """The Frobenius norm `(batch, 1, 1)` of matrices; `dtype` is their dtype before any cast."""
        return self.xp.sqrt(self.xp.sum(x * x, axis=(-2, -1), keepdims=True))

    def solve_upper(self, a: Any, b: Any) -> Any:
        """`a**-1 @ b` of upper triangular matrices without a zero on their diagonals."""
        return self.xp.linalg.solve(a, b)

    def qr(self, x: Any) -> Any:
        """The orthogonal factor, with as many columns as the matrix, and the triangular factor."""
        return self.xp.linalg.qr(x)

    def eigh(self, x: Any) -> Any:
        """The eigenvalues, in ascending order, and eigenvectors of symmetric matrices."""
        return self.xp.linalg.eigh(x)

    def left_vectors(self, x: Any) -> Any:
        """The left singular vectors, in descending order of the singular values."""
        return self.xp.linalg.svd(x, full_matrices=False)[0]


Table = Mapping[Op, Callable[..., Any]]

#: Operation -> the one NumPy function for it.
NAMES: Mapping[Op, str] = having("array")


def arithmetic(of: Functions, **different: Callable[..., Any]) -> Table:
    """Every operation, in the arrays' own dtype. `different` has the library's own form of some, such as `power`."""
    xp = of.xp
    composed: Table = {
        Op.FLOORDIV: lambda a, b: xp.floor(xp.divide(a, b)), Op.RSQRT: lambda x: 1 / xp.sqrt(x),
        Op.SIGN: lambda x: xp.where(xp.isnan(x), x, xp.sign(x)),
        Op.WHERE: lambda condition, a, b: xp.where(condition != 0, a, b), Op.SIGMOID: _sigmoid(of),
        Op.AWAY: partial(bits.away, xp), Op.ULPS: partial(bits.ulps, xp), Op.COARSE: partial(bits.coarse, xp),
        Op.CHANCE: partial(bits.chance, xp),
    }  # fmt: skip
    operations = {op: different.get(op.name.lower(), function) for op, function in composed.items()}
    return operations | {op: different.get(name) or getattr(xp, name) for op, name in NAMES.items()}


def _sigmoid(of: Functions) -> Callable[[Any], Any]:
    def sigmoid(x: Any) -> Any:
        """The logistic function without overflow: exp sees only numbers up to 0."""
        small = of.xp.exp(-of.xp.abs(x))
        return of.filled(of.xp.signbit(x), small, 1.0) / (1.0 + small)

    return sigmoid


def meeting(of: Functions, function: Callable[..., Any]) -> Callable[..., Any]:
    """The operation on numbers and arrays: numbers take the dtype of the arrays."""

    def met(*operands: Any) -> Any:
        floats = [x.dtype for x in operands if getattr(x, "ndim", 0) and of.is_float(x)]
        dtype = of.xp.result_type(*floats) if floats else None
        return function(*(of.fitted(x, dtype) for x in operands))

    return met
