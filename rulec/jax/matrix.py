"""The functions of `rulec.compiler.matrix` on stacks of JAX arrays `(batch, rows, cols)`.

Products are of full precision: that of XLA's default is a few bits on some devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rulec.compiler.matrix import iterations, leading
from rulec.errors import RuleError, TensorError
from rulec.language.node import Op

_EXACT = jax.lax.Precision.HIGHEST


def _product(a: Any, b: Any) -> Any:
    return jnp.matmul(a, b, precision=_EXACT)


def _wide(x: Any) -> Any:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _wide_product(a: Any, b: Any) -> Any:
    """A product that is not rounded to 16 bits."""
    return jnp.matmul(a, b, precision=_EXACT, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def _transpose(x: Any) -> Any:
    return jnp.swapaxes(x, -1, -2)


def is_traced(value: Any) -> bool:
    """Whether a value is not known while a step is traced."""
    return isinstance(value, jax.core.Tracer)


def known_number(value: Any, what: str) -> float:
    """A number that must be known when a step is traced; RuleError where it is traced itself."""
    if is_traced(value):
        raise RuleError(
            f"{what} must be a Python number, and is traced here: close over it, or leave it out of inject_hyperparams"
        )
    return float(value)


def _newton_schulz(x: Any, steps: Any, dtype: str) -> Any:
    """The quintic iteration in the dtype asked for; a product and what is added to it are rounded together."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[-2] > x.shape[-1]
    y = x.astype(dtype)
    y = _transpose(y) if tall else y
    norm = jnp.sqrt(jnp.sum(jnp.square(y.astype(x.dtype)), axis=(-2, -1), keepdims=True)).astype(y.dtype)
    y = y / jnp.maximum(norm, jnp.asarray(1e-7, y.dtype))
    for _ in range(iterations(known_number(steps, "the number of steps of newton_schulz"))):
        gram = _product(y, _transpose(y))
        polynomial = (b * _wide(gram) + c * _wide_product(gram, gram)).astype(dtype)
        y = (a * _wide(y) + _wide_product(polynomial, y)).astype(dtype)
    return (_transpose(y) if tall else y).astype(x.dtype)


def _where_finite(compute: Callable[..., Any]) -> Callable[..., Any]:
    """LAPACK gives anything where a matrix has NaN or infinity: give NaN."""

    def guarded(x: Any, *numbers: Any) -> Any:
        finite = jnp.isfinite(x).all(axis=(-2, -1), keepdims=True)
        return jnp.where(finite, compute(jnp.where(finite, x, 0), *numbers), jnp.nan).astype(x.dtype)

    return guarded


def _signed(vectors: Any) -> Any:
    """The same columns, each with its largest component positive: their signs are the algorithm's whim otherwise."""
    if not vectors.size:
        return vectors
    # jnp's own counts in 64 bits here, and where users keep JAX to 32 their jit cannot compile that.
    largest = jax.lax.argmax(jnp.abs(vectors), vectors.ndim - 2, jnp.int32)[..., None, :]
    return jnp.where(jnp.take_along_axis(vectors, largest, axis=-2) < 0, -vectors, vectors)


def _qr(x: Any) -> Any:
    """The orthogonal factor that belongs to a triangular one without negative diagonal elements."""
    if x.shape[-2] < x.shape[-1]:
        raise TensorError(f"qr needs at least as many rows as columns, and was given {_sides(x)}: transpose the matrix")
    orthogonal, triangular = jnp.linalg.qr(x)
    diagonal = jnp.diagonal(triangular, axis1=-2, axis2=-1)[..., None, :]
    return jnp.where(diagonal < 0, -orthogonal, orthogonal)


def _eigh(x: Any) -> Any:
    return _signed(jnp.linalg.eigh(x, symmetrize_input=False)[1])


def _singular_vectors(x: Any, rank: Any) -> Any:
    count = leading(known_number(rank, "the rank of singular_vectors"), x)
    return _signed(jnp.linalg.svd(x, full_matrices=False)[0][..., :count])


def _inverse_root(x: Any, order: Any, eps: Any = 0) -> Any:
    lambdas, vectors = jnp.linalg.eigh(x, symmetrize_input=False)
    order, eps = jnp.asarray(order, x.dtype), jnp.asarray(eps, x.dtype)
    raised = jnp.maximum(lambdas[..., None, :], 0) + eps
    return _product(vectors * raised ** (-1 / order), _transpose(vectors))


def _sides(x: Any) -> str:
    return f"{x.shape[-2]} by {x.shape[-1]}"


#: The matrix functions.
MATRIX: Mapping[Op, Callable[..., Any]] = {
    Op.MATMUL: _product,
    Op.TRANSPOSE: _transpose,
    Op.NEWTON_SCHULZ: _newton_schulz,
    Op.QR: _where_finite(_qr),
    Op.EIGH: _where_finite(_eigh),
    Op.SINGULAR_VECTORS: _where_finite(_singular_vectors),
    Op.INVERSE_ROOT: _where_finite(_inverse_root),
}
