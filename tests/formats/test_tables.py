"""Values of codes, thresholds between them, float8's rounding, and the look-up that needs no search."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rulec.errors import InternalError
from rulec.formats import Format, Lines, Steps, lines, steps, table, tables, thresholds, zero
from tests.formats.kinds import DYNAMIC, FORMATS

FLOAT8 = {
    "float8_e4m3": (tables.E4M3, ml_dtypes.float8_e4m3fn, 448),
    "float8_e5m2": (tables.E5M2, ml_dtypes.float8_e5m2, 57344),
}


def beside(values: np.ndarray) -> np.ndarray:
    """The values and their neighbours on both sides."""
    up, down = (np.nextafter(values, np.float32(side)) for side in (np.inf, -np.inf))
    return np.concatenate([values, up, down])


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_values_are_those_of_ml_dtypes(name: str) -> None:
    kind, dtype, largest = FLOAT8[name]
    expected = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    for values in (tables.values(kind), table(Format(name, 256))):
        assert np.array_equal(values, expected, equal_nan=True)
        assert np.array_equal(np.signbit(values), np.signbit(expected))
    assert Format(name, 256).largest == float(ml_dtypes.finfo(dtype).max) == largest


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_rounds_as_ml_dtypes_does(name: str) -> None:
    """All floats whose lower sixteen bits are zero, and those around each number, midpoint and power of two."""
    kind, dtype, largest = FLOAT8[name]
    numbers = np.unique(np.abs(table(Format(name, 256))[np.isfinite(table(Format(name, 256)))]))
    midpoints = (numbers[1:] + numbers[:-1]) / np.float32(2)
    upper = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    powers = np.ldexp(np.float32(1), np.arange(-149, 17)).astype(np.float32)
    y = np.concatenate([upper, *(beside(side * x) for x in (numbers, midpoints, powers) for side in (1, -1))])
    y = y.astype(np.float32)
    y = y[np.abs(y) <= np.nextafter(np.float32(largest), np.float32(np.inf))]
    assert y.size > 37_000
    assert np.array_equal(tables.nearest(y, kind), y.astype(dtype).view(np.uint8))


def test_thresholds_are_for_tables_that_are_searched() -> None:
    for key, format in FORMATS.items():
        if format.name.startswith("dynamic"):
            assert (np.diff(table(format)) > 0).all(), key
            between = thresholds(format)
            assert between.shape == (2**format.bits - 1,)
            assert (table(format)[:-1] < between).all()
            assert (between < table(format)[1:]).all()
        else:
            with pytest.raises(InternalError, match=f"{format.name} rounds by arithmetic"):
                thresholds(format)


def test_the_code_after_zero_is_the_smallest_positive_one() -> None:
    for key, format in FORMATS.items():
        values, code = table(format), zero(format)
        assert (code is None) == (key.startswith("dynamic4/128-unsigned")), key
        if code is not None:
            assert values[code] == 0
            assert not np.signbit(values[code])
            assert values[code + 1] == values[values > 0].min()


def test_tables_are_for_reading() -> None:
    with pytest.raises(ValueError, match="read-only"):
        table(FORMATS["dynamic8/256-signed"])[0] = 0


@pytest.mark.parametrize("key", DYNAMIC)
def test_one_look_gives_the_code_of_a_search(key: str) -> None:
    format = DYNAMIC[key]
    between, sides, rng = thresholds(format), (1, -1) if format.signed else (1,), np.random.default_rng(1)
    special = np.float32([0, 1e-45, 1e-38, 1, 1 + 2**-20])
    drawn = rng.random(500_000, np.float32)
    bits = rng.integers(0, 0x3F800001, 500_000, np.uint32).view(np.float32)
    y = np.concatenate([beside(between), *(side * x for x in (special, drawn, bits) for side in sides)])
    y = y if format.signed else np.abs(y)
    codes, none = np.searchsorted(between, y), zero(format)
    assert np.array_equal(steps(format).code(y), codes)
    assert np.array_equal(by_entries(steps(format), y, None), codes)
    if none is not None:
        raised = np.where((y >= 0) & ~np.signbit(y) & (codes == none), none + 1, codes)
        assert np.array_equal(by_entries(steps(format), y, none), raised)


def by_entries(look: Steps, y: Any, none: int | None) -> Any:
    bits, lowest = y.view(np.uint32).astype(np.int64), look.low << look.shift
    size, sign = np.maximum(bits & 0x7FFFFFFF, lowest) - lowest, bits >> 31
    entries = look.entries(none)[(size >> look.shift) + sign * look.cells].astype(np.int64)
    return entries + (size & (1 << look.shift) - 1) * (1 - 2 * sign) >> look.shift


@pytest.mark.parametrize("key", DYNAMIC)
def test_the_look_up_is_the_smallest_there_is(key: str) -> None:
    """Wider cells would have two thresholds; the entries lie in the first cache."""
    look, between = steps(DYNAMIC[key]), thresholds(DYNAMIC[key])
    wider = between.view(np.uint32) >> np.uint32(look.shift + 1)
    assert np.unique(wider).size < wider.size
    assert (look.first.dtype, look.threshold.dtype) == (np.uint8, np.float32)
    assert look.first.size == look.threshold.size == look.cells * (2 if DYNAMIC[key].signed else 1)
    assert look.first.nbytes + look.threshold.nbytes < 16_384


def test_the_look_up_reads_inside_its_cells_whatever_the_bits() -> None:
    y = np.array([np.nan, -np.nan, np.inf, -np.inf, 3e38, -3e38], np.float32)
    for format in DYNAMIC.values():
        assert steps(format).code(y).shape == (6,)


@pytest.mark.parametrize("key", DYNAMIC)
def test_lines_give_the_code_of_a_search(key: str) -> None:
    """The nearest threshold never moves back where y grows, so thresholds and the floats beside them prove the rest."""
    format = DYNAMIC[key]
    look, between = lines(format), thresholds(format)
    ends = np.float32([-1, -0.0, 0, 1e-45, 1]) if format.signed else np.float32([0, 1e-45, 1])
    y = np.concatenate([beside(between), ends])
    assert np.array_equal(look.code(y), np.searchsorted(between, y))
    assert np.array_equal(replace(look, lines=exact(look)).code(y), np.searchsorted(between, y))


def exact(look: Lines) -> tuple[tuple[np.float64, np.float64], ...]:
    """The lines in float64, so that products are not rounded, as in a fused multiply-add."""
    return tuple((np.float64(slope), np.float64(start)) for slope, start in look.lines)
