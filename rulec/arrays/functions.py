"""The functions of an array library that matrix functions are made of, by NumPy's names.

A library that calls one otherwise, or needs another way, says so in a class of its own.
"""

from __future__ import annotations

from typing import Any

#: What every library multiplies matrices in.
WIDE = ("float32", "float64")


class Functions:
    """The functions as a module `xp` has them whose names are NumPy's; no function writes to its operands."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    # Arrays

    def cast(self, x: Any, dtype: Any) -> Any:
        """The array in another dtype, by its name or by the library's own; the same array where it has it."""
        return x.astype(dtype, copy=False)

    def transposed(self, x: Any) -> Any:
        """The matrices with their rows as columns."""
        return self.xp.swapaxes(x, -1, -2)

    def diagonal(self, x: Any) -> Any:
        """The diagonals `(batch, n)` of matrices."""
        return self.xp.diagonal(x, axis1=-2, axis2=-1)

    def filled(self, condition: Any, x: Any, number: float) -> Any:
        """The array, with a number where the condition is false."""
        return self.xp.where(condition, x, number)

    def at_least(self, x: Any, least: float) -> Any:
        """The larger of each element and a number."""
        return self.xp.maximum(x, least)

    def largest(self, x: Any) -> Any:
        """The component of the largest size of each column `(batch, 1, cols)`; the first where there are several."""
        return self.xp.take_along_axis(x, self.xp.argmax(self.xp.abs(x), axis=-2, keepdims=True), axis=-2)

    # Numbers beside arrays

    def is_float(self, x: Any) -> bool:
        """Whether these are numbers with a point."""
        return bool(self.xp.issubdtype(x.dtype, self.xp.floating))

    def fitted(self, x: Any, dtype: Any) -> Any:
        """What takes part in arithmetic with arrays of this dtype: a number in it, an array as it is."""
        return x

    def known(self, number: Any, what: str) -> Any:
        """A number that says how to go on, for which it must be known."""
        return number

    def beside(self, number: Any, x: Any) -> Any:
        """A number as it takes part in arithmetic with a matrix, whose dtype stays."""
        return self.xp.asarray(number, x.dtype)

    # Products and decompositions

    def product_dtype(self, x: Any, dtype: str) -> Any:
        """The dtype to multiply matrices in where this one is asked for: their own, where it has 16 bits."""
        return dtype if dtype in WIDE else x.dtype

    def matmul(self, a: Any, b: Any) -> Any:
        """The product of matrices, in their dtype."""
        return self.xp.matmul(a, b)

    def wide(self, x: Any) -> Any:
        """The array in a dtype of at least 32 bits, where products may have 16."""
        return x

    def wide_matmul(self, a: Any, b: Any) -> Any:
        """The product of matrices in the dtype that `wide` gives."""
        return self.matmul(a, b)

    def norm(self, x: Any, dtype: Any) -> Any:
        """The Frobenius norm `(batch, 1, 1)` of matrices that had this dtype."""
        return self.xp.sqrt(self.xp.sum(x * x, axis=(-2, -1), keepdims=True))

    def qr(self, x: Any) -> Any:
        """An orthogonal factor of as many columns as the matrix, and the triangular one."""
        return self.xp.linalg.qr(x)

    def eigh(self, x: Any) -> Any:
        """Eigenvalues, which ascend, and eigenvectors of symmetric matrices."""
        return self.xp.linalg.eigh(x)

    def left_vectors(self, x: Any) -> Any:
        """The left singular vectors, of which the singular values descend."""
        return self.xp.linalg.svd(x, full_matrices=False)[0]
