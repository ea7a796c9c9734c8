"""Block quantization: blocks of values to codes and a scale, and back, as `rulec.formats` describes.

Codes are also converted to one in each byte, with a scale for each element: this form can be cut and joined anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rulec.errors import TensorError
from rulec.formats import tables
from rulec.formats.format import Format
from rulec.formats.tables import Floats, reach, table, thresholds, zero

Codes = NDArray[np.int8] | NDArray[np.uint8]

_ONE = np.float32(1)

#: Coding -> the number that is rounded to the code of y, by an array library and its numbers in float32.
ROUNDED: Mapping[str, Callable[[Any, Callable[[float], Any], Any], Any]] = {
    "number": lambda xp, number, y: y,
    "root": lambda xp, number, y: xp.sqrt(y) * number(255),
    "softsign": lambda xp, number, y: (y + y) / (number(1) + xp.abs(y)) * number(127),
}


def encode(format: Format, values: ArrayLike) -> tuple[Codes, Floats]:
    """Codes in `codes_shape(values.shape)` and one float32 scale for each block, of float32 values of any shape.

    Four-bit codes lie two in a byte, the earlier element in the upper half; the last half of an odd number is 0.
    """
    values = np.asarray(values, np.float32)
    x = _blocks(format, values)
    finite = np.isfinite(x).all(axis=1, keepdims=True)
    x = np.where(finite, x, np.float32(0))
    if not format.signed:
        x = np.where(x > 0, x, np.float32(0))
    scale = _scale(format, x)
    code = _nearest(format, x * (np.float32(format.largest) / scale))
    if format.floor and zero(format) is not None:
        code = np.where((x > 0) & (code == zero(format)), code + 1, code)
    bits = np.where(finite, code, 0).astype(np.uint8).reshape(-1)[: values.size]
    return packed(format, bits, values.shape), np.where(finite, scale, np.float32(np.nan)).reshape(-1)


def decode(format: Format, codes: ArrayLike, scales: ArrayLike, shape: tuple[int, ...]) -> Floats:
    """float32 values of this shape, of codes and scales that `encode` gave. TensorError for other shapes of them."""
    codes, scales, count = np.asarray(codes), np.asarray(scales, np.float32), math.prod(shape)
    if codes.shape != format.codes_shape(shape) or scales.shape != (format.scales(count),):
        raise TensorError(
            f"{format.text} of shape {tuple(shape)} has codes of shape {format.codes_shape(shape)} and "
            f"{format.scales(count)} scales, and not {codes.shape} and {scales.shape}"
        )
    unit = scales * (_ONE / np.float32(format.largest))
    numbers = table(format)[unpacked(format, codes, count)]
    return (numbers * np.repeat(unit, format.block)[:count]).reshape(shape)


def _blocks(format: Format, values: Floats) -> Floats:
    """The values in C order as rows of a block each, the last filled with zeros."""
    rows = np.zeros((format.scales(values.size), format.block), np.float32)
    rows.reshape(-1)[: values.size] = values.reshape(-1)
    return rows


def _scale(format: Format, x: Floats) -> Floats:
    """The scale of each row of finite values, as a column. The negative side counts where both are as large."""
    positive = x.max(axis=1, keepdims=True, initial=0)
    negative = -x.min(axis=1, keepdims=True, initial=0)
    with np.errstate(over="ignore"):
        scale = np.where(negative >= positive, negative / reach(format), positive)
    bounded: Floats = np.clip(scale, np.float32(format.smallest_scale), np.finfo(np.float32).max)
    return bounded


def _nearest(format: Format, y: Floats) -> NDArray[np.integer]:
    """The code of each y, as an integer whose lower eight bits are the code's."""
    if format.coding == "thresholds":
        return np.searchsorted(thresholds(format), y, side="left")
    if format.coding == "float8":
        return tables.nearest(y, tables.FLOAT8[format.name])
    rounded: NDArray[np.int32] = np.rint(ROUNDED[format.coding](np, np.float32, y)).astype(np.int32)
    return rounded


def packed(format: Format, bits: NDArray[np.uint8], shape: tuple[int, ...]) -> Codes:
    """Codes as they are stored."""
    if format.bits == 8:
        return bits.view(format.code_dtype).reshape(shape)
    pairs = np.zeros((-(-bits.size // 2), 2), np.uint8)
    pairs.reshape(-1)[: bits.size] = bits
    return pairs[:, 0] << 4 | pairs[:, 1]


def unpacked(format: Format, codes: Codes, count: int) -> NDArray[np.uint8]:
    """Stored codes, one in each uint8, in C order."""
    bits = np.ascontiguousarray(codes).view(np.uint8).reshape(-1)
    if format.bits == 8:
        return bits
    return np.stack([bits >> 4, bits & 15], axis=-1).reshape(-1)[:count]


def spread(format: Format, codes: Codes, scales: Floats, count: int) -> tuple[Codes, Floats]:
    """The code and the scale of each of `count` elements, of codes and scales that `encode` gave."""
    bits = unpacked(format, codes, count)
    return bits.view(format.code_dtype), np.repeat(np.reshape(scales, -1), format.block)[:count]


def gathered(format: Format, codes: Codes, scales: Floats) -> tuple[Codes, Floats] | None:
    """Codes in `codes_shape` of one dimension, and a scale for each block; None where a block has several scales."""
    firsts = scales[:: format.block]
    same: NDArray[np.bool_] = np.repeat(firsts.view(np.int32), format.block)[: scales.size] == scales.view(np.int32)
    return (packed(format, codes.view(np.uint8), codes.shape), firsts) if same.all() else None


def decode_spread(format: Format, codes: Codes, scales: Floats) -> Floats:
    """The float32 value of each element, as `decode` has it."""
    values: Floats = table(format)[codes.view(np.uint8)] * (scales * (np.float32(1) / np.float32(format.largest)))
    return values
