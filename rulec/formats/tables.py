"""The tables of formats: the values of codes where the scale is 1, and the thresholds between them.

Floats of eight bits are here too: their values, and rounding to the nearest by operations on the bits of float32.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rulec.errors import InternalError
from rulec.formats.format import Format


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


#: The floats of each format of these.
FLOAT8: Mapping[str, Float8] = {"float8_e4m3": E4M3, "float8_e5m2": E5M2}

Floats = NDArray[np.float32]


def table(format: Format) -> Floats:
    """float32 of shape (2**bits,), read-only: the value of each code, by the code's bits as uint8.

    A decoded value is the product with the block's `scale*(1/largest)`, and so with the scale where `largest` is 1.
    """
    return _table(format.name, format.signed)


def thresholds(format: Format) -> Floats:
    """float32 of shape (2**bits - 1,), ascending: a value's code is the number of thresholds strictly below it.

    They are the midpoints of neighbours in the table of dynamic8 or dynamic4; other formats round by arithmetic.
    """
    if format.coding != "thresholds":
        raise InternalError(f"{format.name} rounds by arithmetic, without thresholds")
    values = table(format).astype(np.float64)
    return ((values[:-1] + values[1:]) / 2).astype(np.float32)


def reach(format: Format) -> np.float32:
    """How far codes reach below zero, as a share of how far above: less than 1 in signed dynamic8 and dynamic4."""
    return -table(format)[0] if format.signed and format.coding == "thresholds" else np.float32(1)


def zero(format: Format) -> int | None:
    """The code of zero as uint8, which the code of the smallest positive value follows; None where no code is zero."""
    codes = np.flatnonzero(table(format) == 0)
    return int(codes[0]) if codes.size else None


@functools.cache
def _table(name: str, signed: bool) -> Floats:
    """The table of a format, by what it depends on."""
    values: Floats = _FORMULAS.get((name, signed), _FORMULAS.get((name, None), lambda: _root(255)))()
    values.flags.writeable = False
    return values


def _dynamic(exponents: int, fractions: int) -> Floats:
    """0, 1, and `fractions*2**i` means between 0.1 and 1, times `10**(i + 1 - exponents)`, for each exponent i.

    Source: bitsandbytes' create_dynamic_map (Dettmers, arXiv:2110.02861), on processors with fused multiply-adds.
    """
    decades = [np.array([0, 1], np.float32)]
    for i in range(exponents):
        ends = _linspace(fractions * 2**i + 1)
        decades.append(np.float32(10.0 ** (i + 1 - exponents)) * ((ends[:-1] + ends[1:]) / np.float32(2)))
    return np.sort(np.concatenate(decades))


def _mirrored(values: Floats) -> Floats:
    """A table with the negative of each entry between 0 and 1."""
    return np.concatenate([-values[1:-1][::-1], values])


def _linspace(count: int) -> Floats:
    """float32 numbers from 0.1 to 1 as torch.linspace spaces them: from each end to the middle, rounded once each."""
    first, steps = np.float32(0.1), np.arange(count, dtype=np.float64)
    step = np.float64((np.float32(1) - first) / np.float32(count - 1))
    from_first, from_last = np.float64(first) + steps * step, 1 - steps[::-1] * step
    spaced: Floats = np.where(steps < count // 2, from_first, from_last).astype(np.float32)
    return spaced


def _root(largest: int) -> Floats:
    """Squares of codes, for values whose roots are spaced evenly."""
    t: Floats = np.arange(256, dtype=np.float32) * (np.float32(1) / np.float32(largest))
    return t * t


def _signed_codes() -> Floats:
    """The numbers that bytes are as int8."""
    return np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)


def _softsign() -> Floats:
    """The inverse of y = 2x/(1 + abs(x)) at codes/127 (flashoptim)."""
    t = _signed_codes() * (np.float32(1) / np.float32(127))
    inverse: Floats = np.divide(t, np.float32(2) - np.abs(t), dtype=np.float32)
    return inverse


_FORMULAS: Mapping[tuple[str, bool | None], Any] = {
    ("int8", True): _signed_codes,
    ("softsign8", True): _softsign,
    ("dynamic8", True): lambda: _mirrored(_dynamic(7, 1)),
    ("dynamic8", False): lambda: _dynamic(7, 2),
    ("dynamic4", True): lambda: _mirrored(_dynamic(3, 1)),
    ("dynamic4", False): lambda: np.arange(1, 17, dtype=np.float32) / np.float32(16),
    ("float8_e4m3", None): lambda: values(E4M3),
    ("float8_e5m2", None): lambda: values(E5M2),
}
