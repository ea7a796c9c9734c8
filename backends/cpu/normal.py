"""Standard normal numbers by Box and Muller's method, two from each pair of words, without branches."""

from __future__ import annotations

from typing import Any

from ..common.constants import TABLES
from .lanes import Real, Truth, Unit, Whole, fma, polynomial, sqrt, where
from .math import log


def normal_pair(unit: Unit, first: Any, second: Any) -> tuple[Real, Real]:
    """The two normal numbers of two words, LLVM integers of 32 bits, as in `rulec.array_api.random.normal`.

    The error of each is at most 4 ulp.
    """
    radius = sqrt(log(_uniform(unit, first)) * -2.0)
    cosine, sine = turned(_uniform(unit, second))
    return radius * cosine, radius * sine


def _uniform(unit: Unit, word: Any) -> Real:
    """The upper 23 bits of a word, in the middle of their cell between 0 and 1: exact."""
    form = unit.form
    wide = word if form.bits == 32 else unit.builder.zext(word, unit.whole_type)
    fraction = (Whole(unit, wide) >> 9) << (form.fraction - 23)
    return (fraction | form.pattern(1.0)).as_real() - (1.0 - 2.0**-24)


def turned(turns: Real) -> tuple[Real, Real]:
    """The cosine and the sine of an angle in turns, from 0 to 1."""
    form, table = turns.unit.form, TABLES[turns.unit.form]
    magic = 1.5 * 2.0**form.fraction  # added to it, a small number is rounded to an integer, in the lowest bits
    shifted = fma(turns, 4.0, magic)
    quarter = shifted.bits()
    rest = fma(turns, 4.0, magic - shifted)
    square = rest * rest
    sine, cosine = rest * polynomial(square, table.sine), fma(square, polynomial(square, table.cosine), 1.0)
    odd = _is_odd(quarter)
    return (
        _negated(where(odd, sine, cosine), quarter + 1),
        _negated(where(odd, cosine, sine), quarter),
    )


def _is_odd(count: Whole) -> Truth:
    from llvmlite import ir

    return Truth(count.unit, count.unit.builder.trunc(count.value, ir.IntType(1)))


def _negated(value: Real, quarter: Whole) -> Real:
    """The value, or its negative where bit 1 of `quarter` is set."""
    return (value.bits() ^ ((quarter & 2) << (value.unit.form.bits - 2))).as_real()
