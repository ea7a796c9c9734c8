"""Encoding and decoding: bounds of the error, values that are kept, and codes that do not change when encoded again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rulec.errors import TensorError
from rulec.formats import Format, decode, encode, parse, reach, table, thresholds, zero
from tests.formats.kinds import DYNAMIC, FORMATS, one_by_one

LARGEST = np.finfo(np.float32).max

#: How far a decoded value is from its value, at most, as a share of the scale; in float8 of the value where more.
SHARE = {
    ("int8", True): 1 / 254, ("int8", False): 1 / 255, ("softsign8", True): 1 / 127, ("softsign8", False): 1 / 255,
    ("dynamic8", True): 0.0071, ("dynamic8", False): 0.0036, ("dynamic4", True): 0.1126, ("dynamic4", False): 1 / 16,
    ("float8_e4m3", True): 1 / 458752, ("float8_e4m3", False): 1 / 458752,
    ("float8_e5m2", True): 1 / 7.5e9, ("float8_e5m2", False): 1 / 7.5e9,
}  # fmt: skip
OF_VALUE = {"float8_e4m3": 1 / 16, "float8_e5m2": 1 / 8}

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
#: Values whose block has most of its codes, beside values of any size.
NEAR = st.floats(-1, 1, width=32)


def arrays(elements: st.SearchStrategy[float]) -> st.SearchStrategy[np.ndarray]:
    """Up to some blocks of values, the last of them short or not."""
    return hnp.arrays(np.float32, st.integers(0, 40), elements=elements)


def small(key: str) -> Format:
    """The format in blocks of eight, so that few values are many blocks."""
    format = FORMATS[key]
    return Format(format.name, 8, format.signed, format.floor)


def scale_of_each(format: Format, scales: np.ndarray, count: int) -> np.ndarray:
    return np.repeat(scales.astype(np.float64), format.block)[:count]


def again(format: Format, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Decoded values, and the codes before and after they are encoded once more."""
    codes, scales = encode(format, x)
    decoded = decode(format, codes, scales, x.shape)
    return decoded, codes, encode(format, decoded)[0]


def distance(format: Format, x: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The bound of the documentation, in float64, with the rounding of float32 and of its subnormals."""
    scale = scale_of_each(format, scales, x.size)
    bound = SHARE[format.name, format.signed] * scale
    bound = np.maximum(bound, OF_VALUE.get(format.name, 0) * np.abs(x))
    if format.floor and zero(format) is not None:
        values = table(format)
        bound = np.maximum(bound, values[values > 0].min() / format.largest * scale)
    return bound * (1 + 1e-5) + 2.0**-21 * np.abs(x) + 2.0**-148


@pytest.mark.parametrize("key", FORMATS)
@settings(max_examples=60)
@given(x=arrays(FINITE) | arrays(NEAR))
def test_values_are_near_and_codes_stay(key: str, x: np.ndarray) -> None:
    format = small(key)
    codes, scales = encode(format, x)
    decoded, _, codes_again = again(format, x)
    value = x if format.signed else np.maximum(x, 0)
    assert np.isfinite(decoded).all()
    assert (np.abs(decoded.astype(np.float64) - value) <= distance(format, value, scales)).all()
    assert np.array_equal(codes, codes_again)
    if format.floor:
        assert (decoded[x > 0] > 0).all()
    if format.name != "dynamic4" or format.signed:
        assert (decoded[value == 0] == 0).all()


@pytest.mark.parametrize("key", FORMATS)
@settings(max_examples=40)
@given(x=arrays(st.floats(width=32)))
def test_a_value_that_is_not_finite_is_seen_in_its_block_alone(key: str, x: np.ndarray) -> None:
    format = small(key)
    codes, scales = encode(format, x)
    decoded, _, codes_again = again(format, x)
    lost = np.array([not np.isfinite(x[i : i + 8]).all() for i in range(0, x.size, 8)], bool)
    assert np.array_equal(np.isnan(scales), lost)
    assert np.array_equal(np.isnan(decoded), np.repeat(lost, 8)[: x.size])
    assert np.array_equal(codes, codes_again)
    without = np.where(np.isnan(decoded), np.float32(0), x)
    beside = decode(format, *encode(format, without), x.shape)
    assert np.array_equal(decoded, np.where(np.isnan(decoded), decoded, beside), equal_nan=True)
    assert (one_by_one(format, codes)[: x.size][np.isnan(decoded)] == 0).all()


def whole(format: Format) -> Iterator[np.ndarray]:
    """The codes that encoding gives: with the largest, and with the most negative one without the largest."""
    values = table(format)
    bits = np.arange(values.size)
    normal = np.isfinite(values) & (np.abs(values) <= format.largest)
    if format.name in ("int8", "softsign8") and format.signed:
        normal &= bits != 128
    if not format.signed:
        normal &= ~np.signbit(values)
    yield bits[normal]
    if reach(format) < 1:
        yield bits[:-1]


@pytest.mark.parametrize("key", FORMATS)
def test_every_code_stays_at_every_scale(key: str) -> None:
    """All codes together, with scales of each exponent and several mantissas, subnormal ones and the largest too."""
    format = FORMATS[key]
    powers = np.ldexp(1.0, np.arange(-149, 128))
    sizes = np.concatenate([powers * m for m in (1, 1.1, 1.5, 2 - 2**-23)] + [[LARGEST]]).astype(np.float32)
    for bits in whole(format):
        rows = np.resize(bits, (sizes.size, max(256, format.block)))
        codes = rows.astype(np.uint8)
        unit = sizes * (np.float32(1) / np.float32(format.largest))
        many = Format(format.name, rows.shape[1], format.signed, format.floor)
        x = table(format)[codes] * unit[:, None]
        decoded, first, second = again(many, x)
        assert np.array_equal(first, second)
        normal = unit >= 2.0**-126
        assert np.array_equal(one_by_one(format, first).reshape(codes.shape)[normal], codes[normal])
        assert (np.abs(decoded - x)[normal] <= 2.0**-20 * np.abs(x[normal]) + 2.0**-148).all()


@pytest.mark.parametrize("key", FORMATS)
def test_scales_move_little_however_often_they_are_encoded(key: str) -> None:
    format = FORMATS[key]
    x = np.random.default_rng(2).standard_normal((64, format.block)).astype(np.float32)
    codes, scales = encode(format, np.abs(x) if not format.signed else x)
    first = scales
    for _ in range(30):
        same, scales = encode(format, decode(format, codes, scales, x.shape))
        assert np.array_equal(same, codes)
    moved = np.abs(scales.view(np.int32) - first.view(np.int32)).max()
    assert moved <= (8 if format.largest > 1 else 0)


@pytest.mark.parametrize("key", [key for key in FORMATS if "dynamic" not in key and not key.endswith("floor")])
def test_the_largest_floats_stay_finite(key: str) -> None:
    format = Format(FORMATS[key].name, 8, FORMATS[key].signed)
    top = np.arange(LARGEST.view(np.uint32) - 4095, LARGEST.view(np.uint32) + 1, dtype=np.uint32).view(np.float32)
    x = np.zeros((4096, 8), np.float32)
    x[:, 3] = top
    decoded, codes, codes_again = again(format, x)
    assert np.isfinite(decoded).all()
    assert np.allclose(decoded[:, 3], top, rtol=1e-6)
    assert np.array_equal(codes, codes_again)


@pytest.mark.parametrize("name", ["dynamic8", "dynamic4"])
def test_the_scale_of_the_largest_negative_floats_is_the_largest_float(name: str) -> None:
    format = Format(name, 8)
    codes, scales = encode(format, np.float32([-LARGEST, LARGEST / 2, 0]))
    assert scales[0] == LARGEST
    assert decode(format, codes, scales, (3,))[0] == -reach(format) * LARGEST


@pytest.mark.parametrize("name", ["dynamic8", "dynamic4"])
def test_the_negative_side_scales_where_it_is_as_large(name: str) -> None:
    """A positive value just below it decodes to its size: the scale must not turn to the positive side then."""
    format = Format(name, 8)
    for positive in (0.5, 0.9999, 1.0):
        x = np.float32([-1, positive, 0.3, -0.01])
        _, scales = encode(format, x)
        assert scales[0] == 1 / reach(format)
        decoded, first, second = again(format, x)
        assert decoded[0] == -1
        assert np.array_equal(first, second)
    assert encode(format, np.float32([-1, np.nextafter(np.float32(1), np.float32(2))]))[1][0] > 1
    assert encode(format, np.float32([-0.9999, 1, 0.3]))[1][0] == 1


@pytest.mark.parametrize("key", DYNAMIC)
def test_a_value_at_a_threshold_gets_the_lower_code(key: str) -> None:
    format, between = FORMATS[key], thresholds(FORMATS[key])
    up = np.nextafter(between, np.float32(2))
    for values, code in ((between, np.arange(between.size)), (up, np.arange(between.size) + 1)):
        codes, scales = encode(Format(format.name, 256, format.signed), np.append(values, np.float32(1)))
        assert scales[0] == 1
        assert np.array_equal(one_by_one(format, codes)[: between.size], code)


def test_halves_round_to_even() -> None:
    codes, _ = encode(Format("int8", 8), np.float32([127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5]))
    assert codes.tolist() == [127, 0, 2, 2, 0, -2, 126]


def test_codes_are_those_of_the_formulas() -> None:
    """Worked by hand: softsign of 1/3 is 1/2, the root of 1/4 is 1/2."""
    assert encode(Format("softsign8", 8), np.float32([3, 1, -1]))[0].tolist() == [127, 64, -64]
    assert encode(Format("softsign8", 8, signed=False), np.float32([4, 1, 0.04]))[0].tolist() == [255, 128, 26]
    assert encode(Format("int8", 8, signed=False), np.float32([4, 1, 0.04]))[0].tolist() == [255, 128, 26]
    assert encode(Format("int8", 8), np.float32([2, 1, -2]))[0].tolist() == [127, 64, -127]
    assert encode(Format("float8_e4m3", 8), np.float32([448, 1, -2, -0.0]))[0].tolist() == [0x7E, 0x38, 0xC0, 0x80]


@pytest.mark.parametrize("key", FORMATS)
def test_an_empty_block_has_the_smallest_scale(key: str) -> None:
    format = FORMATS[key]
    codes, scales = encode(format, np.float32([0, -0.0, 0]))
    assert scales.tolist() == [format.smallest_scale]
    assert format.smallest_scale * (1 / format.largest) >= 2.0**-126
    assert np.isfinite(np.float32(format.largest) / scales[0])
    assert (decode(format, codes, scales, (3,)) <= 2.0**-130).all()


@pytest.mark.parametrize("key", [key for key in FORMATS if "unsigned" in key])
def test_negative_values_of_a_state_of_none_are_zero(key: str) -> None:
    x = np.float32([1, -5, -0.0, 0, -1e-30])
    codes, scales = encode(FORMATS[key], x)
    expected = encode(FORMATS[key], np.maximum(x, 0) + np.float32(0))
    assert scales[0] == 1
    assert np.array_equal(codes, expected[0])


@pytest.mark.parametrize("key", [key for key in FORMATS if key.endswith("floor")])
def test_the_floor_keeps_values_above_zero(key: str) -> None:
    """The smallest positive value, where the format without the floor has zero; and nothing else changes."""
    floor = FORMATS[key]
    plain = floor.for_state(signed=floor.signed, floor=False)
    x = np.float32([1, 1e-12, 1e-45, 0, -1e-12, 0.5])
    kept, lost = (decode(format, *encode(format, x), x.shape) for format in (floor, plain))
    tiny = [1, 2]
    if zero(floor) is None:
        assert np.array_equal(kept, lost)
        assert (kept > 0).all()
    else:
        values = table(floor)
        assert (kept[tiny] == values[values > 0].min() * (np.float32(1) / np.float32(floor.largest))).all()
        assert (lost[tiny] == 0).all()
        assert np.array_equal(np.delete(kept, tiny), np.delete(lost, tiny))


def test_elements_are_taken_in_c_order_and_blocks_may_be_short() -> None:
    format, x = parse("int8/8"), np.arange(1, 22, dtype=np.float32).reshape(3, 7)
    codes, scales = encode(format, np.asfortranarray(x))
    assert scales.tolist() == [8, 16, 21]
    assert np.array_equal(codes, encode(format, x)[0])
    assert codes.reshape(-1)[:8].tolist() == [16, 32, 48, 64, 79, 95, 111, 127]
    assert np.array_equal(
        decode(format, np.asfortranarray(codes), scales, (3, 7)), decode(format, codes, scales, (3, 7))
    )


def test_two_codes_of_four_bits_lie_in_a_byte_the_first_in_the_upper_half() -> None:
    codes, _ = encode(Format("dynamic4", 8, signed=False), np.float32([1, 0.0625, 0.5]))
    assert codes.tolist() == [0xF0, 0x70]


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0)])
@pytest.mark.parametrize("key", FORMATS)
def test_one_element_and_none(key: str, shape: tuple[int, ...]) -> None:
    x = np.full(shape, 0.7, np.float32)
    decoded = decode(FORMATS[key], *encode(FORMATS[key], x), shape)
    assert decoded.shape == shape
    assert decoded.dtype == np.float32
    assert np.allclose(decoded, x, rtol=1e-6)


def test_arrays_of_another_shape_are_refused() -> None:
    format = parse("dynamic8/8")
    codes, scales = encode(format, np.ones((2, 8), np.float32))
    message = r"dynamic8/8 of shape \(16,\) has codes of shape \(16,\) and 2 scales, and not \(2, 8\) and \(2,\)"
    with pytest.raises(TensorError, match=message):
        decode(format, codes, scales, (16,))
    with pytest.raises(TensorError, match=r"and 2 scales, and not \(2, 8\) and \(1,\)"):
        decode(format, codes, scales[:1], (2, 8))
