"""The words of C-style source: storage of 16 bits exhaustively, special values, and the C library's ulps."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest

from rulec_backends.c import CBackend
from tests.backends.c_functions import Array, elementary, function
from tests.backends.test_cpu_math import (
    SPECIAL,
    assert_same_class,
    every_size,
    greatest_error,
    power_arguments,
    ulp,
)
from tests.backends.test_cpu_storage import BITS, awkward, rounded, widened

pytestmark = pytest.mark.skipif(CBackend().unavailable_reason() is not None, reason="there is no C compiler")

GLIBC = platform.libc_ver()[0] == "glibc"

# Storage


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_widening_is_exact(storage: str) -> None:
    got = function(f"from_{storage}(x0[i])", "bits", "float32")(BITS)
    with np.errstate(invalid="ignore"):
        assert np.array_equal(got, widened(storage, BITS).astype(np.float32), equal_nan=True)


def narrowed(storage: str, compute: str, values: Array) -> Array:
    value = "x0[i]" if compute == "float32" else "to_odd(x0[i])"
    return widened(storage, function(f"to_{storage}({value})", compute, "bits")(values))


@pytest.mark.parametrize("compute", ["float32", "float64"])
@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_narrowing_rounds_once(storage: str, compute: str) -> None:
    with np.errstate(over="ignore"):
        values = awkward(storage).astype(compute)
    got, wanted = narrowed(storage, compute, values), rounded(storage, values.astype(np.float64))
    assert np.array_equal(got, wanted, equal_nan=True)
    assert np.array_equal(np.signbit(got[wanted == 0]), np.signbit(values[wanted == 0]))


@pytest.mark.parametrize("compute", ["float32", "float64"])
@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_narrowing_numbers_of_every_size(storage: str, compute: str) -> None:
    values = every_size(compute, 300_000)
    with np.errstate(invalid="ignore"):
        wanted = rounded(storage, values.astype(np.float64))
    assert np.array_equal(narrowed(storage, compute, values), wanted, equal_nan=True)


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_a_nan_stays_a_nan_whatever_its_bits(storage: str) -> None:
    nans = np.array([0x7F800001, 0x7FBFFFFF, 0x7FFFFFFF, 0xFF800001, 0xFFFF0000, 0xFFFFFFFF], np.uint32)
    assert np.isnan(narrowed(storage, "float32", nans.view(np.float32))).all()
    wide = np.array([0x7FF0000000000001, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF], np.uint64)
    assert np.isnan(narrowed(storage, "float64", wide.view(np.float64))).all()


# Special values


def pairs(dtype: str) -> tuple[Array, Array]:
    """All pairs of special values."""
    values = np.array([*SPECIAL, *(-x for x in SPECIAL), math.nan], dtype)
    x, y = (np.ascontiguousarray(a.ravel()) for a in np.meshgrid(values, values))
    return x, y


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_minimum_maximum_and_sign(dtype: str) -> None:
    x, y = pairs(dtype)
    assert np.array_equal(elementary("minimum", dtype, 2)(x, y), np.minimum(x, y), equal_nan=True)
    assert np.array_equal(elementary("maximum", dtype, 2)(x, y), np.maximum(x, y), equal_nan=True)
    signs = elementary("sign", dtype)(x)
    assert np.array_equal(signs, np.sign(x), equal_nan=True)
    assert not np.signbit(signs[x == 0]).any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_modulo_is_numpys(dtype: str) -> None:
    x, y = pairs(dtype)
    with np.errstate(all="ignore"):
        wanted = np.mod(x, y)
    got = elementary("modulo", dtype, 2)(x, y)
    assert np.array_equal(got, wanted, equal_nan=True)
    assert np.array_equal(np.signbit(got[got == 0]), np.signbit(wanted[wanted == 0]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_powers_of_special_values_are_those_of_c(dtype: str) -> None:
    x, y = pairs(dtype)
    with np.errstate(all="ignore"):
        wanted = np.power(x.astype(np.float64), y.astype(np.float64)).astype(dtype)
        assert_same_class(elementary("pow", dtype, 2)(x, y), wanted)
        for name, exponent in (("root", 0.5), ("inverse_square", -2.0)):
            wanted = np.power(x.astype(np.float64), np.full(x.size, exponent)).astype(dtype)
            assert_same_class(elementary(name, dtype)(x), wanted)


# Ulps

#: The greatest error that c_words says of the C library, and of the words made of its functions.
STATED = {
    "exp": (1, 1), "log": (1, 1), "tanh": (2.2, 2.2), "cbrt": (1, 4), "erf": (1, 1), "pow": (1, 1),
    "sin": (1, 1), "cos": (1, 1), "log1p": (1, 1), "expm1": (1, 1), "hypot": (1, 1),
    "sigmoid": (2.5, 2.5), "root": (0.5, 0.5), "inverse_square": (2.5, 2.5),
}  # fmt: skip

WIDE: dict[str, Callable[..., Any]] = {
    "exp": np.exp, "log": np.log, "tanh": np.tanh, "cbrt": np.cbrt, "erf": np.vectorize(math.erf, otypes=[float]),
    "sigmoid": lambda x: np.where(x < 0, np.exp(-np.abs(x)), 1) / (1 + np.exp(-np.abs(x))),
    "root": lambda x: np.power(x, np.full_like(x, 0.5)), "inverse_square": lambda x: x**-2.0, "sin": np.sin,
    "cos": np.cos, "log1p": np.log1p, "expm1": np.expm1,
}  # fmt: skip

EXACT: dict[str, Callable[..., Any]] = {
    "exp": mpmath.exp, "log": mpmath.log, "tanh": mpmath.tanh, "cbrt": lambda x: mpmath.sign(x) * mpmath.cbrt(abs(x)),
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)), "erf": mpmath.erf, "root": mpmath.sqrt,
    "inverse_square": lambda x: 1 / x**2, "sin": mpmath.sin, "cos": mpmath.cos,
    "log1p": mpmath.log1p, "expm1": mpmath.expm1,
}  # fmt: skip


@pytest.mark.skipif(not GLIBC, reason="the ulps of another C library are its own")
@pytest.mark.parametrize("name", WIDE)
def test_single_precision(name: str) -> None:
    x = every_size("float32", 10_000 if name == "erf" else 100_000)
    got = elementary(name, "float32")(x)
    with np.errstate(all="ignore"):
        wanted = WIDE[name](x.astype(np.float64))
        assert_same_class(got, wanted.astype(np.float32))
        finite = np.isfinite(wanted) & np.isfinite(got)
        error = np.abs(got[finite] - wanted[finite]) / ulp(wanted[finite], "float32")
    assert error.max() <= STATED[name][0] + 1e-6, x[finite][error.argmax()]


@pytest.mark.skipif(not GLIBC, reason="the ulps of another C library are its own")
@pytest.mark.parametrize("name", EXACT)
def test_double_precision(name: str) -> None:
    ordinary = np.random.default_rng(1).standard_normal(1000) * np.exp(np.linspace(-30, 6, 1000))
    x = np.concatenate([ordinary, every_size("float64", 500)])
    x = x[np.isfinite(x) & (x != 0) & ((x > 0) | (name not in ("log", "root"))) & ((x > -1) | (name != "log1p"))]
    assert greatest_error(elementary(name, "float64")(x), [x], EXACT[name]) <= STATED[name][1]


@pytest.mark.skipif(not GLIBC, reason="the ulps of another C library are its own")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_distances(dtype: str) -> None:
    x = every_size(dtype, 400)
    x = x[np.isfinite(x)]
    y = np.roll(x, 7)
    got = elementary("hypot", dtype, 2)(x, y)
    with np.errstate(all="ignore"):
        assert_same_class(got, np.hypot(x, y))
    finite = np.isfinite(got)
    worst = worst_of(got[finite], [x[finite], y[finite]], mpmath.hypot, dtype)
    assert worst <= STATED["hypot"][dtype == "float64"]


def worst_of(got: Array, operands: list[Array], exact: Callable[..., Any], dtype: str) -> float:
    """The greatest error in ulps of `dtype`."""
    with mpmath.workdps(40):
        wanted = [exact(*map(mpmath.mpf, row)) for row in zip(*(x.tolist() for x in operands), strict=True)]
        units = ulp(np.array([float(w) for w in wanted]), dtype)
        return max(
            float(abs(w - value) / unit) for w, value, unit in zip(wanted, got.tolist(), units.tolist(), strict=True)
        )


@pytest.mark.skipif(not GLIBC, reason="the ulps of another C library are its own")
def test_power() -> None:
    x, y = power_arguments("float32", 60_000)
    got = elementary("pow", "float32", 2)(x, y)
    with np.errstate(all="ignore"):
        wanted = np.power(x.astype(np.float64), y.astype(np.float64))
        assert_same_class(got, wanted.astype(np.float32))
        finite = np.isfinite(got)
        error = np.abs(got[finite] - wanted[finite]) / ulp(wanted[finite], "float32")
    assert error.max() <= STATED["pow"][0]
    x, y = power_arguments("float64", 600)
    assert greatest_error(elementary("pow", "float64", 2)(x, y), [x, y], mpmath.power) <= STATED["pow"][1]
