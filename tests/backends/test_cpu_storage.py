"""Loads and stores of every storage format: exact one way, rounded once to nearest, halves to even, the other."""

from __future__ import annotations

import numpy as np
import pytest

from tests.backends.cpu_functions import Array, function

BITS = np.arange(2**16, dtype=np.uint16)
#: Fraction bits, smallest exponent and largest number of each 16-bit format.
FORMATS = {"float16": (10, -14, 65504.0), "bfloat16": (7, -126, 3.3895313892515355e38)}


def widened(storage: str, bits: Array) -> Array:
    """The numbers that these bits are, in float64."""
    if storage == "float16":
        return bits.view(np.float16).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def rounded(storage: str, values: Array) -> Array:
    """The nearest number of a format, halves to even, in float64: exact, for it only divides by powers of two."""
    fraction, smallest, largest = FORMATS[storage]
    with np.errstate(all="ignore"):
        exponent = np.maximum(np.frexp(values)[1] - 1, smallest) - fraction
        near = np.ldexp(np.rint(np.ldexp(values, -exponent)), exponent)
    return np.where(np.abs(near) > largest, np.copysign(np.inf, values), near)


def awkward(storage: str) -> Array:
    """Every number of the format, what lies half way to the next, and a hair on either side of that."""
    numbers = widened(storage, BITS)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    halves = (numbers[1:] + numbers[:-1]) / 2
    beyond = FORMATS[storage][2] * (1 + np.array([-1e-9, 0, 1e-9, 2.0 ** -(FORMATS[storage][0] + 2), 0.1, 1e30]))
    found = [numbers, halves, np.nextafter(halves, np.inf), np.nextafter(halves, -np.inf), beyond, -beyond]
    return np.concatenate([*found, [np.inf, -np.inf, np.nan, 5e-324, -5e-324]])


@pytest.mark.parametrize("compute", ["float32", "float64"])
@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_widening_is_exact(storage: str, compute: str) -> None:
    expression = "float64(x0)" if compute == "float64" else "x0"
    got = function(expression, (), storage, compute)(BITS)
    with np.errstate(invalid="ignore"):
        assert np.array_equal(got, widened(storage, BITS).astype(compute), equal_nan=True)


@pytest.mark.parametrize("compute", ["float32", "float64"])
@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_narrowing_rounds_once(storage: str, compute: str) -> None:
    with np.errstate(over="ignore"):
        values = awkward(storage).astype(compute)
    got = widened(storage, function("x0", (), compute, storage)(values))
    wanted = rounded(storage, values.astype(np.float64))
    assert np.array_equal(got, wanted, equal_nan=True)
    assert np.array_equal(np.signbit(got[wanted == 0]), np.signbit(values[wanted == 0]))


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_a_nan_stays_a_nan_whatever_its_bits(storage: str) -> None:
    nans = np.array([0x7F800001, 0x7FBFFFFF, 0x7FFFFFFF, 0xFF800001, 0xFFFF0000, 0xFFFFFFFF], np.uint32).view(
        np.float32
    )
    tame = "ordinary(x0)" if storage == "bfloat16" else "x0"
    assert np.isnan(widened(storage, function(tame, ("ordinary",), "float32", storage)(nans))).all()
    wide = np.array([0x7FF0000000000001, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF], np.uint64).view(np.float64)
    assert np.isnan(widened(storage, function("x0", (), "float64", storage)(wide))).all()


def test_single_and_double_precision_convert_as_numpy_does() -> None:
    values = np.array([1 / 3, 1e-310, 1e300, -np.inf, np.nan, 2.0**-149 * 1.5])
    with np.errstate(all="ignore"):
        narrow = values.astype(np.float32)
    assert np.array_equal(function("x0", (), "float64", "float32")(values), narrow, equal_nan=True)
    assert np.array_equal(function("x0", (), "float32", "float64")(narrow), narrow.astype(np.float64), equal_nan=True)
