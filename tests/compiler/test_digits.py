"""Eigenvectors, singular vectors and roots in 50 digits: beside NumPy and JAX, and where they are not determined."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from rulec.compiler.digits import EXACT_MATRIX
from rulec.compiler.matrix import MATRIX
from rulec.errors import RuleError
from rulec.jax.library import MATRIX as JAX_MATRIX
from rulec.language.expr.arithmetic import mpmath_context
from rulec.language.expr.node import Op

Array = np.ndarray[Any, Any]


def digits(x: Any) -> Array:
    return np.asarray(np.frompyfunc(mpmath_context().mpf, 1, 1)(np.asarray(x, np.float64)))


def exact(op: Op, x: Array, *numbers: float) -> Array:
    return np.asarray(EXACT_MATRIX[op](digits(x), *numbers).astype(np.float64))


def by_jax(op: Op, x: Array, *numbers: float) -> Array:
    with jax.enable_x64(True):
        return np.asarray(JAX_MATRIX[op](jax.numpy.asarray(x), *numbers))


def by_numpy(op: Op, x: Array, *numbers: float) -> Array:
    return MATRIX[op].compute(x, *numbers)


def symmetric(*values: float, seed: int = 0) -> Array:
    """A matrix with these eigenvalues, in a stack of one."""
    turned = np.linalg.qr(np.random.default_rng(seed).standard_normal((len(values), len(values))))[0]
    x = turned * np.array(values) @ turned.T
    return np.asarray(((x + x.T) / 2)[None])  # a product is symmetric but for rounding


@pytest.mark.parametrize("gap", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("run", [by_numpy, by_jax])
def test_errors_of_vectors_follow_the_gaps(run: Any, gap: float) -> None:
    """A vector's error is a few roundings of the matrix, divided by the distance to the nearest other value."""
    values = np.array([1.0, 1.0 + gap, 4.0])
    symmetrical = symmetric(*values)
    x = symmetrical @ np.eye(3)
    apart = np.abs(run(Op.EIGH, x) - exact(Op.EIGH, x))[0].max(0)
    gaps = np.array([gap, gap, 3.0 - gap])
    assert (apart <= 16 * 2.0**-53 * 4 / gaps).all()
    sides = np.concatenate([x, np.zeros((1, 2, 3))], axis=1)
    apart = np.abs(run(Op.SINGULAR_VECTORS, sides, 3) - exact(Op.SINGULAR_VECTORS, sides, 3))[0].max(0)
    assert (apart <= 16 * 2.0**-53 * 4 / gaps[::-1]).all()


@pytest.mark.parametrize("run", [by_numpy, by_jax])
@pytest.mark.parametrize("order", [2, 3, 4])
def test_roots_have_digits_for_equal_eigenvalues(run: Any, order: int) -> None:
    x, eps = symmetric(1.0, 1.0, 0.0, 9.0), 1e-6
    known = exact(Op.INVERSE_ROOT, x, order, eps)
    scale = np.abs(known).max()
    assert np.abs(run(Op.INVERSE_ROOT, x, order, eps) - known).max() <= 64 * 2.0**-53 * 9 / eps * scale
    power = np.linalg.matrix_power(np.linalg.inv(known[0]), order)
    np.testing.assert_allclose(power, x[0] + eps * np.eye(4), atol=1e-8)


def test_vectors_are_those_of_the_matrix_to_50_digits() -> None:
    x = digits(symmetric(1.0, 2.0, 3.0))
    vectors = EXACT_MATRIX[Op.EIGH](x)
    turned = vectors[0].T @ x[0] @ vectors[0]
    beside = turned - np.diag(np.diag(turned))
    assert max(abs(beside).max(), abs(vectors[0].T @ vectors[0] - digits(np.eye(3))).max()) < 1e-45
    assert all(column[abs(column).argmax()] > 0 for column in vectors[0].T)
    tall = digits(np.random.default_rng(1).standard_normal((1, 4, 2)))
    left = EXACT_MATRIX[Op.SINGULAR_VECTORS](tall, 2)[0]
    projected = left @ (left.T @ tall[0])
    assert abs(projected - tall[0]).max() < 1e-45


EQUAL, TORN = "two of its {} are equal, so any basis", "a vector has several largest components, of both signs"


@pytest.mark.parametrize(
    ("op", "x", "reason"),
    [
        (Op.EIGH, np.eye(3), EQUAL.format("eigenvalues")),
        (Op.EIGH, symmetric(1.0, 1.0 + 1e-11, 2.0)[0], EQUAL.format("eigenvalues")),
        (Op.EIGH, np.outer([1.0, 2, 3], [1.0, 2, 3]), EQUAL.format("eigenvalues")),
        (Op.EIGH, np.array([[1.0, 2], [2, 1]]), TORN),
        (Op.SINGULAR_VECTORS, np.eye(3)[:, :2], EQUAL.format("singular values")),
        (Op.SINGULAR_VECTORS, np.outer([1.0, 2, 3], [1.0, 2]), EQUAL.format("singular values")),
    ],
)
def test_what_is_not_determined_has_no_digits(op: Op, x: Array, reason: str) -> None:
    with pytest.raises(RuleError, match=f"{op.symbol} of a matrix of . rows has no 50-digit form here: {reason}"):
        exact(op, np.stack([symmetric(1.0, 2.0, 3.0)[0][: x.shape[0], : x.shape[1]], x]), *[2] * (op is not Op.EIGH))


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 0), (2, 3, 3)])
def test_nothing_and_zeros_have_the_vectors_of_every_library(shape: tuple[int, ...]) -> None:
    np.testing.assert_array_equal(exact(Op.EIGH, np.zeros(shape)), by_numpy(Op.EIGH, np.zeros(shape)))


def test_what_is_not_finite_is_nan_beside_others() -> None:
    x = np.concatenate([symmetric(1.0, 2.0, 3.0), np.full((1, 3, 3), np.inf)])
    for op, numbers in ((Op.EIGH, ()), (Op.INVERSE_ROOT, (4, 1e-3)), (Op.SINGULAR_VECTORS, (2,))):
        assert np.isnan(exact(op, x, *numbers)[1]).all()
        assert np.isfinite(exact(op, x, *numbers)[0]).all()
