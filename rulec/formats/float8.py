"""Floats of eight bits: their values, and rounding to the nearest of them by operations on the bits of float32."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Float8(NamedTuple):
    """A sign, exponent bits and mantissa bits. `infinite` says that the largest exponent is for infinity and NaN."""

    mantissa: int
    bias: int
    infinite: bool


#: ml_dtypes' and torch's float8_e4m3fn, whose largest number is 448: no infinity, and one NaN of each sign.
E4M3 = Float8(3, 7, infinite=False)
#: IEEE's form with five bits of exponent, whose largest number is 57344.
E5M2 = Float8(2, 15, infinite=True)


def values(kind: Float8) -> NDArray[np.float32]:
    """float32 of shape (256,): the number that each byte is."""
    code = np.arange(128)
    exponent, fraction = code >> kind.mantissa, code & ((1 << kind.mantissa) - 1)
    hidden = (exponent > 0) << kind.mantissa
    positive = np.ldexp((fraction + hidden).astype(np.float32), np.maximum(exponent, 1) - kind.bias - kind.mantissa)
    if kind.infinite:
        positive[exponent == exponent.max()] = np.nan
        positive[127 - (1 << kind.mantissa) + 1] = np.inf
    else:
        positive[127] = np.nan
    return np.concatenate([positive, -positive]).astype(np.float32)


def nearest(y: NDArray[np.float32], kind: Float8) -> NDArray[np.uint8]:
    """The bits of the number nearest to y, ties to even, for y no farther from zero than the largest number is.

    A normal number keeps its upper mantissa bits, after an addition that carries from the lower ones. A smaller number
    is rounded by its addition to a power of two: the last place of the sum is the smallest subnormal.
    """
    bits = y.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    drop = 23 - kind.mantissa
    half = np.uint32((1 << (drop - 1)) - 1) + ((magnitude >> np.uint32(drop)) & np.uint32(1))
    normal = ((magnitude + half) >> np.uint32(drop)) - np.uint32((127 - kind.bias) << kind.mantissa)
    power = np.float32(2.0 ** (24 - kind.bias - kind.mantissa))
    small = (np.abs(y) + power).view(np.uint32) - power.view(np.uint32)
    code = np.where(np.abs(y) < np.float32(2.0 ** (1 - kind.bias)), small, normal)
    rounded: NDArray[np.uint8] = (code | (bits >> np.uint32(24) & np.uint32(0x80))).astype(np.uint8)
    return rounded
