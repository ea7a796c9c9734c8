"""Philox4x32-10 on vectors of blocks, as LLVM instructions, with the rounds of `rulec.array_api.random`.

A word is in the lower half of 64 bits: vectors of all processors multiply two such words to 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rulec.array_api.random import rounds

from .lanes import DOUBLE, Unit, Whole

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
