"""Random numbers of the cpu backend: Philox4x32-10 on vectors of blocks, and standard normal numbers.

Philox is LLVM instructions, with the rounds of `rulec.array_api.random`. A word is in the lower half of 64 bits:
vectors of all processors multiply two such words to 64 bits. Box and Muller's method makes two normal numbers from each
pair of words, without branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rulec.array_api.random import rounds

from ..common.constants import DOUBLE, TABLES
from .lanes import Real, Truth, Unit, Whole, fma, polynomial, sqrt, where
from .math import log

#: Blocks made together: they fill one register of 512 bits, or two of 256.
BLOCKS = 8


class Word(Whole):
    """A word of each block: an LLVM vector of 64-bit integers, or one integer while all words are equal."""

    def instruction(self, name: str, other: Whole | int) -> Word:
        a, b = self.value, other.value if isinstance(other, Whole) else constant(self.value.type, other)
        if a.type != b.type:
            a, b = self.vector(a), self.vector(b)
        return Word(self.unit, getattr(self.unit.builder, name)(a, b))

    def vector(self, value: Any) -> Any:
        """The value in the lane of each block."""
        from llvmlite import ir

        return spread(self.unit.builder, value, BLOCKS) if isinstance(value.type, ir.IntType) else value


def constant(kind: Any, number: float) -> Any:
    """A number of an LLVM type; for a vector type, the same in each lane."""
    from llvmlite import ir

    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [ir.Constant(kind.element, number)] * kind.count)
    return ir.Constant(kind, number)


def spread(builder: Any, value: Any, count: int) -> Any:
    """A vector with this value in each of `count` lanes."""
    from llvmlite import ir

    one = builder.insert_element(ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, _lane(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), count), [_lane(0)] * count))


def _lane(index: int) -> Any:
    from llvmlite import ir

    return ir.Constant(ir.IntType(32), index)


def generated(builder: Any, counter: Sequence[Any], key: Sequence[Any]) -> Any:
    """Four words of each block, block by block, as one vector of 64-bit integers with two words each.

    `counter` and `key` are LLVM values of 64 bits below 2**32. The first of `counter` is a vector, all others integers.
    """
    from llvmlite import ir

    unit = Unit(builder, DOUBLE)
    a, b, c, d = rounds([Word(unit, value) for value in counter], [Word(unit, value) for value in key])
    order = [_lane(lane + BLOCKS * half) for lane in range(BLOCKS) for half in range(2)]
    halves = [word.vector(word.value) for word in (a | b << 32, c | d << 32)]
    return builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(ir.IntType(32), 2 * BLOCKS), order))


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
