"""The mean of products of rows: in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rulec.jax
from rulec.errors import TensorError


def test_leading_dimensions_are_rows() -> None:
    rows = np.random.default_rng(0).normal(size=(3, 4, 5))
    wanted = np.cov(rows.reshape(12, 5).T, bias=True) + np.outer(rows.mean((0, 1)), rows.mean((0, 1)))
    with jax.enable_x64(True):
        moment = jax.jit(rulec.jax.covariance)(jnp.asarray(rows))
        np.testing.assert_allclose(moment, wanted, rtol=1e-12)
        np.testing.assert_allclose(rulec.jax.covariance(jnp.asarray(rows), scale=3), 9 * wanted, rtol=1e-12)


def test_rows_of_16_bits_are_added_in_float32() -> None:
    moment = rulec.jax.covariance(jnp.ones((4097, 2), jnp.bfloat16))
    assert moment.dtype == jnp.float32
    np.testing.assert_array_equal(moment, 1)


def test_a_number_is_refused() -> None:
    with pytest.raises(TensorError, match="covariance takes an array of rows"):
        rulec.jax.covariance(jnp.ones(()))
