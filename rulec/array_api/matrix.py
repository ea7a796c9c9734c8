"""The matrix functions of the language, once for all array libraries.

Matrices are stacks `(batch, rows, cols)` of one dtype, and results keep it. Other operands are single numbers, or
stacks `(batch, 1, 1)` where a number may differ from matrix to matrix. The result for a matrix with NaN or infinity is
NaN; its neighbours in the stack are untouched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rulec.array_api.functions import Functions
from rulec.array_api.newton_schulz import newton_schulz
from rulec.array_api.ordering import argsort, sort, take, topk
from rulec.array_api.selection import quantile
from rulec.errors import TensorError
from rulec.language.expr.counts import MAX_ELEMENTS, is_count
from rulec.language.expr.node import Op
from rulec.language.expr.static import BLOCKWISE


def leading(rank: Any, x: Any) -> int:
    """The number of singular vectors to compute; TensorError where the matrices `x`, with elements, have fewer."""
    most = min(x.shape[-2:]) or MAX_ELEMENTS
    if not is_count(rank, 1, most):
        raise TensorError(f"a matrix of {_sides(x)} has no {float(rank):g} singular vectors: choose from 1 to {most}")
    return int(rank)


def _sides(x: Any) -> str:
    return f"{x.shape[-2]} by {x.shape[-1]}"


def matrix_functions(of: Functions, special: MatrixFunctions | None = None) -> Mapping[Op, Callable[..., Any]]:
    """Every matrix function, on the arrays of a library. `special` has the library's forms of some."""
    functions = special or MatrixFunctions(of)
    return blockwise(
        of,
        {
            Op.MATMUL: of.matmul,
            Op.MODE_PRODUCT: functions.mode_product,
            Op.GRAM: functions.gram,
            Op.TRANSPOSE: of.transposed,
            Op.EYE: functions.eye,
            Op.DIAG: functions.diag,
            Op.TRIU: of.xp.triu,
            Op.TRIL: of.xp.tril,
            Op.SLICE: functions.slice,
            Op.CONCAT: functions.concat,
            Op.SOLVE: functions.solve,
            Op.CHOLESKY: functions.where_finite(functions.cholesky),
            Op.TOPK: partial(topk, of),
            Op.QUANTILE: partial(quantile, of),
            Op.SORT: partial(sort, of),
            Op.ARGSORT: partial(argsort, of),
            Op.TAKE: partial(take, of),
            Op.NEWTON_SCHULZ: partial(newton_schulz, of),
            Op.QR: functions.where_finite(functions.qr),
            Op.EIGH: functions.where_finite(functions.eigh),
            Op.SINGULAR_VECTORS: functions.where_finite(functions.singular_vectors),
            Op.INVERSE_ROOT: functions.where_finite(functions.inverse_root),
        },
    )


def blockwise(of: Functions, table: Mapping[Op, Callable[..., Any]]) -> Mapping[Op, Callable[..., Any]]:
    """The table with the function of `Op.IN_BLOCKS`, which calls the other functions of the table."""
    return {**table, Op.IN_BLOCKS: partial(of_row_blocks, of, table)}


def of_row_blocks(
    of: Functions, table: Mapping[Op, Callable[..., Any]], x: Any, *others: Any, function: str, **keywords: Any
) -> Any:
    """A function of each block of rows, all blocks of all matrices in one stack; the last operand has a block's rows.

    A second matrix has as many blocks. TensorError where the rows of a block do not divide those of the matrix.
    """
    *operands, size = others
    rows = int(size)
    if rows < 1 or x.shape[-2] % rows:
        raise TensorError(f"{function} cannot cut a matrix of {_sides(x)} into blocks of {rows} rows")
    count, matrices = x.shape[-2] // rows, 2 if function in ("matmul", "solve") else 1
    both = [x, *operands][:matrices]
    batch = max(each.shape[0] for each in both)
    whole = [y if y.shape[0] == batch else of.xp.broadcast_to(y, (batch, *y.shape[1:])) for y in both]
    stacks = [y.reshape(batch * count, y.shape[-2] // max(count, 1), y.shape[-1]) for y in whole]
    result = table[BLOCKWISE[function]](*stacks, *operands[matrices - 1 :], **keywords)
    return result.reshape(batch, count * result.shape[-2], result.shape[-1])


@dataclass(frozen=True)
class MatrixFunctions:
    """The matrix functions that are more than one function of a library."""

    of: Functions

    def where_finite(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """A function with NaN for each matrix with NaN or infinity: LAPACK fails there, or gives any numbers."""
        of = self.of

        def guarded(x: Any, *numbers: Any) -> Any:
            finite = of.is_finite(x).all(axis=(-2, -1), keepdims=True)
            return of.cast(of.filled(finite, compute(of.filled(finite, x, 0), *numbers), math.nan), x.dtype)

        return guarded

    def mode_product(self, x: Any, q: Any, n: Any, before: Any, after: Any) -> Any:
        """A dimension of tensors, each a matrix of its elements in order, multiplied by the rows of matrices.

        The dimension has `n` indices, with `before` elements in the dimensions before it and `after` behind it.
        """
        xp, n, before, after = self.of.xp, int(n), int(before), int(after)
        rows = xp.swapaxes(x.reshape(len(x), before, n, after), 2, 3).reshape(len(x), before * after, n)
        product = self.of.matmul(rows, q).reshape(len(x), before, after, n)
        return xp.swapaxes(product, 2, 3).reshape(x.shape)

    def gram(self, x: Any, n: Any, before: Any, after: Any) -> Any:
        """The inner products of all pairs of indices of a dimension, which is as that of `mode_product`."""
        n, before, after = int(n), int(before), int(after)
        rows = self.of.xp.swapaxes(x.reshape(len(x), before, n, after), 1, 2).reshape(len(x), n, before * after)
        return self.of.matmul(rows, self.of.transposed(rows))

    def eye(self, n: Any) -> Any:
        """The identity, with as many rows as this."""
        return self.of.xp.eye(int(n))[None]

    def diag(self, x: Any) -> Any:
        """The diagonal of square matrices as `(batch, n, 1)`; the diagonal matrices of vectors."""
        if x.shape[-2] == x.shape[-1]:
            return self.of.diagonal(x)[..., None]
        vector = x if x.shape[-1] == 1 else self.of.transposed(x)
        return self.on_diagonal(vector)

    def on_diagonal(self, vector: Any) -> Any:
        """The diagonal matrices of vectors `(batch, n, 1)`, with zeros beside the diagonal."""
        xp, (batch, n, _) = self.of.xp, vector.shape
        return xp.triu(xp.tril(xp.broadcast_to(vector, (batch, n, n))))

    def slice(self, x: Any, start: Any, stop: Any, axis: str = "rows") -> Any:
        """The rows, or columns, from one place up to another."""
        places = slice(int(start), None if stop == math.inf else int(stop))
        return x[:, places] if axis == "rows" else x[:, :, places]

    def concat(self, a: Any, b: Any, axis: int = 0) -> Any:
        """The rows of `b` below those of `a`, or for axis 1 the columns beside them."""
        batch = max(a.shape[0], b.shape[0])
        whole = [x if x.shape[0] == batch else self.of.xp.broadcast_to(x, (batch, *x.shape[-2:])) for x in (a, b)]
        return self.of.xp.concatenate(whole, axis - 2)

    def solve(self, a: Any, b: Any, kind: str = "full") -> Any:
        """`a**-1 @ b`; NaN for each matrix `a` with a zero on the diagonal, of itself or of its triangular factor.

        A full matrix is decomposed by `qr`. The rows and columns of a lower one, backwards, are an upper one.
        """
        of = self.of
        finite = of.is_finite(a).all(axis=(-2, -1), keepdims=True)
        a = of.filled(finite, a, 0)
        if kind == "full":
            orthogonal, a = of.qr(a)
            b = of.matmul(of.transposed(orthogonal), b)
        elif kind == "lower":
            a, b = of.backwards(a, 2), of.backwards(b, 1)
        a = of.xp.triu(a)
        diagonal = of.diagonal(a)[..., None]
        regular = (diagonal != 0).all(axis=(-2, -1), keepdims=True)
        # A matrix without a solution is the identity here: LAPACK's wrappers raise errors for it, or give any numbers.
        result = of.solve_upper(of.xp.where(regular, a, self.on_diagonal(of.xp.ones_like(diagonal))), b)
        result = of.backwards(result, 1) if kind == "lower" else result
        return of.cast(of.filled(regular, result, math.nan), b.dtype)

    def cholesky(self, x: Any) -> Any:
        """The lower factor of symmetric matrices; NaN for each that is not positive definite.

        With `x = v @ diag(w) @ v.T` it is the triangular factor of the root's QR decomposition: no library's Cholesky
        says in the same way that there is none.
        """
        of = self.of
        lambdas, vectors = of.eigh(x)
        positive = (lambdas > 0).all(axis=-1)[..., None, None]
        root = of.transposed(vectors * of.at_least(lambdas[..., None, :], 0) ** 0.5)
        triangular = of.qr(root)[1]
        signs = of.xp.where(of.diagonal(triangular)[..., None] < 0, -triangular, triangular)
        return of.filled(positive, of.transposed(of.xp.triu(signs)), math.nan)

    def signed(self, vectors: Any) -> Any:
        """The same columns, each with its largest component positive: algorithms choose signs at will."""
        if not math.prod(vectors.shape):
            return vectors
        return self.of.xp.where(self.of.largest(vectors) < 0, -vectors, vectors)

    def qr(self, x: Any) -> Any:
        """The orthogonal factor beside a triangular one without negative diagonal elements: so it is unique."""
        if x.shape[-2] < x.shape[-1]:
            raise TensorError(
                f"qr needs at least as many rows as columns, and was given {_sides(x)}: transpose the matrix"
            )
        orthogonal, triangular = self.of.qr(x)
        return self.of.xp.where(self.of.diagonal(triangular)[..., None, :] < 0, -orthogonal, orthogonal)

    def eigh(self, x: Any) -> Any:
        """The eigenvectors of symmetric matrices."""
        return self.signed(self.of.eigh(x)[1])

    def singular_vectors(self, x: Any, rank: Any) -> Any:
        """The first left singular vectors; zeros for matrices without elements, as many as asked for."""
        count = leading(self.of.known(rank, "the rank of singular_vectors"), x)
        if not min(x.shape[-2:]):
            return self.of.xp.zeros((*x.shape[:-1], count), dtype=x.dtype)
        return self.signed(self.left_vectors(x, count))

    def left_vectors(self, x: Any, count: int) -> Any:
        """The first left singular vectors, with any signs."""
        return self.of.left_vectors(x)[..., :count]

    def inverse_root(self, x: Any, order: Any, eps: Any = 0) -> Any:
        """`(x + eps)` to the power of `-1/order`; eigenvalues made negative by rounding are zero."""
        of = self.of
        lambdas, vectors = of.eigh(x)
        order, eps = of.beside(order, x), of.beside(eps, x)
        raised = of.at_least(lambdas[..., None, :], 0) + eps
        return of.matmul(vectors * of.power(raised, -1 / order), of.transposed(vectors))
