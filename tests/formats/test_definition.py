"""The definition once more, for one value at a time in Python's floats, each operation rounded to float32 by `struct`.

A product, quotient, sum or root of float32 numbers in float64, rounded to float32, is the operation in float32, for 53
bits are more than twice 24 and two. So the arithmetic and its order are compared here, bit for bit.
"""

from __future__ import annotations

import itertools
import math
import struct

import ml_dtypes
import numpy as np
import pytest

from rulec.formats import Format, decode, encode, table
from tests.formats.kinds import FORMATS, edges, one_by_one

FLOAT8 = {"float8_e4m3": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


def f32(x: float) -> float:
    """The nearest float32."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


def scale_of(format: Format, x: list[float]) -> float:
    positive, negative = max(0.0, *x), max(0.0, *(-value for value in x))
    dynamic = format.name.startswith("dynamic") and format.signed
    reach = -min(table(format).tolist()) if dynamic else 1.0
    scale = f32(negative / reach) if negative >= positive else positive
    return max(scale, format.smallest_scale)


def code_of(format: Format, x: float, inverse: float) -> int:
    """The bits of the code, as an integer from 0 to 255."""
    y = f32(x * inverse)
    if format.name in FLOAT8:
        return int(np.float32(y).astype(FLOAT8[format.name]).view(np.uint8))
    if format.name.startswith("dynamic"):
        values = table(format).tolist()
        return sum(f32((low + high) / 2) < y for low, high in itertools.pairwise(values))
    if not format.signed:
        return round(f32(f32(math.sqrt(y)) * 255))
    if format.name == "softsign8":
        y = f32(f32(f32(y + y) / f32(1 + abs(y))) * 127)
    return round(y) % 256


def value_of(format: Format, code: int, scale: float) -> float:
    number = code - 256 if code > 127 else code
    if format.name == "int8" and format.signed:
        return f32(number * f32(scale * f32(1 / 127)))
    if format.name in FLOAT8:
        value = float(np.uint8(code).view(FLOAT8[format.name]))
        return f32(value * f32(scale * f32(1 / format.largest)))
    if format.name.startswith("dynamic"):
        return f32(float(table(format)[code]) * scale)
    if not format.signed:
        t = f32(code * f32(1 / 255))
        return f32(f32(t * t) * scale)
    t = f32(number * f32(1 / 127))
    return f32(f32(t / f32(2 - abs(t))) * scale)


def blocks(format: Format) -> np.ndarray:
    """Blocks of eight of every magnitude, some sparse, some with values where the code changes."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal((64, 8)) * np.exp(rng.uniform(0, 6, (64, 1)) * rng.standard_normal((64, 8)))
    x = x * 10.0 ** rng.uniform(-44, 30, (64, 1)) * (rng.random(x.shape) > 0.1)
    x = (x if format.signed else np.abs(x)).astype(np.float32)
    scales = np.exp(rng.uniform(-70, 70, 200)).astype(np.float32)
    return np.concatenate([x, edges(format, scales, rng)])


@pytest.mark.parametrize("key", FORMATS)
def test_bits_are_those_of_the_formulas_in_their_order(key: str) -> None:
    format = Format(FORMATS[key].name, 8, FORMATS[key].signed, FORMATS[key].floor)
    x = blocks(format)
    codes, scales = encode(format, x)
    decoded = decode(format, codes, scales, x.shape)
    bits = one_by_one(format, codes).reshape(x.shape)
    zero = next((code for code in range(2**format.bits) if table(format)[code] == 0), None)
    for row, values in enumerate(x.tolist()):
        scale = scale_of(format, values)
        assert float(scales[row]) == scale
        expected = [code_of(format, value, f32(format.largest / scale)) for value in values]
        if format.floor and zero is not None:
            pairs = zip(values, expected, strict=True)
            expected = [zero + 1 if value > 0 and code == zero else code for value, code in pairs]
        assert bits[row].tolist() == expected
        assert decoded[row].tolist() == [value_of(format, code, scale) for code in expected]
