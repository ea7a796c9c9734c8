"""Numbers in memory: float64, float32, and two 16-bit formats with arithmetic in float32.

Widening is exact. Narrowing rounds once, to nearest and halves to even, from any width; too large numbers become
infinite. A NaN stays a NaN. In bfloat16 this needs zeros in the lower half of its bits, as in NaNs loaded from
bfloat16, in NaNs of arithmetic, and after `ordinary`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rulec.array_api.bits import GOLDEN, MIXING, NUMBERS, SILVER

from ..common.constants import DOUBLE, SINGLE
from .lanes import Real, Unit, Whole, where

STORAGES = ("float64", "float32", "float16", "bfloat16", "int16", "int8")


def memory_type(storage: str) -> Any:
    """The LLVM type of an element; bfloat16 moves as an integer, as no instruction computes with it."""
    from llvmlite import ir

    types = {
        "float64": ir.DoubleType(),
        "float32": ir.FloatType(),
        "float16": ir.HalfType(),
        "bfloat16": ir.IntType(16),
        "int16": ir.IntType(16),
        "int8": ir.IntType(8),
    }
    return types[storage]


def widen(builder: Any, value: Any, storage: str) -> Any:
    """The LLVM value of a loaded element: a double for float64, else a float."""
    from llvmlite import ir

    if storage == "float16":
        return builder.fpext(value, ir.FloatType())
    if storage == "bfloat16":
        bits = builder.zext(value, ir.IntType(32))
        return builder.bitcast(builder.shl(bits, ir.Constant(ir.IntType(32), 16)), ir.FloatType())
    if storage in ("int16", "int8"):
        return builder.sitofp(value, ir.FloatType())
    return value


def narrow(value: Real, storage: str) -> Any:
    """The LLVM value to store for a computed value."""
    builder, element = value.unit.builder, memory_type(storage)
    wide = value.unit.form is DOUBLE
    if storage == "float64":
        return value.value if wide else builder.fpext(value.value, element)
    if storage == "float32":
        return builder.fptrunc(value.value, element) if wide else value.value
    if storage in ("int16", "int8"):
        return builder.trunc(_count(value).value, element)
    single = _to_odd_single(ordinary(value)) if wide else value
    if storage == "float16":
        return builder.fptrunc(single.value, element)
    return builder.trunc(_brain_bits(single).value, element)


def _count(value: Real) -> Whole:
    """A whole number far below 2**31 as an integer."""
    return Whole(value.unit, value.unit.builder.fptosi(value.value, value.unit.whole_type))


def away(x: Real, count: Real) -> Real:
    """`x` moved away from zero by a count of ulps."""
    return (x.bits() + _count(count)).as_real()


def ulps(x: Real, y: Real) -> Real:
    """The ulps from `y` away from zero to `x`, of one sign; 0 where `x` is NaN."""
    count = x.bits() - y.bits()
    number = Real(x.unit, x.unit.builder.sitofp(count.value, x.unit.real_type))
    return where(x.is_nan(), 0.0, number)


def coarse(x: Real, count: Real) -> Real:
    """`x` moved away from zero by a count of ulps, its lowest 16 bits cleared; `x` where it is not finite."""
    moved = (x.bits() + _count(count)) & -0x10000
    return where(abs(x) < math.inf, moved.as_real(), x)


def chance(unit: Unit, place: Any, first_place: Any, words: Sequence[Any]) -> Real:
    """The random number below 2**16 of the element at a place, an int64: see `rulec.array_api.bits`.

    Places lie less than 2**32 behind the first place of a loop, so vectors of 32 bits tell where the upper half grows.
    """
    from llvmlite import ir

    builder = unit.builder
    narrow = Unit(builder, SINGLE)
    seed_low, seed_high, number, step, draw = (Whole(narrow, builder.fptoui(word, narrow.whole_type)) for word in words)
    low = Whole(narrow, builder.trunc(place, narrow.whole_type))
    before = builder.trunc(first_place, narrow.whole_type)
    start = builder.trunc(builder.lshr(first_place, ir.Constant(place.type, 32)), narrow.whole_type)
    grown = builder.icmp_unsigned("<", low.value, before)
    stream = _scrambled(_scrambled(number + draw * NUMBERS) ^ (seed_low + seed_high * (1 << 16)))
    first, second = _scrambled(stream ^ step) + Whole(narrow, start) * SILVER, _scrambled(stream * GOLDEN + step)
    counter = low * GOLDEN + Whole(narrow, builder.select(grown, (first + SILVER).value, first.value))
    (shift, factor), (next_shift, next_factor), (last, _) = MIXING
    mixed = (counter ^ (counter >> shift)) * factor + second
    mixed = (mixed ^ (mixed >> next_shift)) * next_factor
    return Real(unit, builder.uitofp((mixed >> last).value, unit.real_type))


def in_range(builder: Any, place: Any, *words: Any) -> Any:
    """The place in a whole tensor of the element at a place of a part: a range behind a start of two words."""
    from llvmlite import ir

    low, high = (builder.fptoui(word, place.type) for word in words)
    return builder.add(place, builder.add(low, builder.shl(high, ir.Constant(place.type, 24))))


def in_rows(builder: Any, place: Any, *words: Any) -> Any:
    """The same of a part that is rows of a width with gaps between them: see `rulec.array_api.slices`."""
    from llvmlite import ir

    width, gap = (in_range(builder, ir.Constant(place.type, 0), *words[i : i + 2]) for i in (2, 4))
    row = builder.udiv(place, width)
    return builder.add(in_range(builder, place, *words[:2]), builder.mul(row, gap))


def _scrambled(x: Whole) -> Whole:
    for shift, factor in MIXING:
        x = (x ^ (x >> shift)) * factor
    return x


def ordinary(value: Real) -> Real:
    """The value, with one NaN for all: only the highest bit of its fraction is set."""
    return where(value.is_nan(), math.nan, value)


def _to_odd_single(value: Real) -> Real:
    """A double rounded to odd as a float: rounding it once more to 16 bits gives the result of one rounding."""
    from llvmlite import ir

    builder = value.unit.builder
    unit = Unit(builder, SINGLE)
    near = Real(unit, builder.fptrunc(value.value, ir.FloatType()))
    back = Real(value.unit, builder.fpext(near.value, ir.DoubleType()))
    # Where rounding went away from zero, step back: the bits of a float and its magnitude grow together.
    too_far = builder.zext((abs(back) > abs(value)).value, unit.whole_type)
    toward_zero = near.bits() - Whole(unit, too_far)
    # Ordered comparisons: a NaN is neither too far nor inexact, and stays as it is.
    inexact = (back < value) | (back > value)
    return (toward_zero | Whole(unit, builder.zext(inexact.value, unit.whole_type))).as_real()


def half(builder: Any, pair: Any, upper: bool) -> Any:
    """A bfloat16 as a float, from a word of two: the upper half comes later in memory."""
    from llvmlite import ir

    word = ir.IntType(32)
    bits = builder.and_(pair, ir.Constant(word, 0xFFFF0000)) if upper else builder.shl(pair, ir.Constant(word, 16))
    return builder.bitcast(bits, ir.FloatType())


def joined(lower: Real, upper: Real) -> Any:
    """The word of two floats rounded to bfloat16."""
    return (_brain_bits(lower) | (_rounded_up(upper) & 0xFFFF0000)).value


def _brain_bits(value: Real) -> Whole:
    """The bits of a float rounded to bfloat16, in the low half."""
    return _rounded_up(value) >> 16


def _rounded_up(value: Real) -> Whole:
    """The bits of a float; the upper half is rounded to bfloat16. The rounding bits must not carry through a NaN."""
    bits = value.bits()
    return bits + 0x7FFF + ((bits >> 16) & 1)
