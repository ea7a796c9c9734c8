"""Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011) on vectors of blocks, as LLVM instructions.

A word is kept in the lower half of 64 bits, where every processor's vectors multiply it by another to all of 64 bits.
What is alike in all blocks stays one integer until it meets what is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: Blocks that are made together: their number fills one register of 512 bits, or two of 256.
BLOCKS = 8

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10


@dataclass(frozen=True)
class Word:
    """A word of each block: an LLVM vector of 64-bit integers, or one integer where all are alike."""

    builder: Any
    value: Any

    @property
    def alike(self) -> bool:
        from llvmlite import ir

        return isinstance(self.value.type, ir.IntType)

    def spread(self) -> Any:
        """The vector."""
        return spread(self.builder, self.value, BLOCKS) if self.alike else self.value

    def __xor__(self, other: Word) -> Word:
        if self.alike and other.alike:
            return Word(self.builder, self.builder.xor(self.value, other.value))
        return Word(self.builder, self.builder.xor(self.spread(), other.spread()))

    def shifted_up(self) -> Word:
        """The word in the upper half."""
        return Word(self.builder, self.builder.shl(self.value, self._constant(32)))

    def plus(self, number: int) -> Word:
        """The sum with a constant, of 32 bits."""
        return Word(self.builder, self._low(self.builder.add(self.value, self._constant(number))))

    def times(self, factor: int) -> tuple[Word, Word]:
        """The upper and the lower word of the product with a constant."""
        product = self.builder.mul(self.value, self._constant(factor))
        high = self.builder.lshr(product, self._constant(32))
        return Word(self.builder, high), Word(self.builder, self._low(product))

    def _low(self, value: Any) -> Any:
        return self.builder.and_(value, self._constant(_WORD))

    def _constant(self, number: int) -> Any:
        return constant(self.value.type, number)


def constant(kind: Any, number: float) -> Any:
    """A number of an LLVM type, in each lane where that is a vector."""
    from llvmlite import ir

    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [ir.Constant(kind.element, number)] * kind.count)
    return ir.Constant(kind, number)


def spread(builder: Any, value: Any, count: int) -> Any:
    """A vector with this value in each of so many lanes."""
    from llvmlite import ir

    one = builder.insert_element(ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, _lane(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), count), [_lane(0)] * count))


def _lane(index: int) -> Any:
    from llvmlite import ir

    return ir.Constant(ir.IntType(32), index)


def generated(builder: Any, counter: Sequence[Any], key: Sequence[Any]) -> Any:
    """Four words of each block, block by block, as one vector of 64-bit integers that have two words each.

    `counter` and `key` are LLVM values of 64 bits below 2**32: integers but for the counter's first, a vector.
    """
    c, k = [Word(builder, value) for value in counter], [Word(builder, value) for value in key]
    for _ in range(_ROUNDS):
        (high0, low0), (high1, low1) = c[0].times(_MULTIPLIERS[0]), c[2].times(_MULTIPLIERS[1])
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [word.plus(step) for word, step in zip(k, _WEYL, strict=True)]
    halves = [_joined(builder, c[0], c[1]), _joined(builder, c[2], c[3])]
    return _woven(builder, *halves)


def _joined(builder: Any, low: Word, high: Word) -> Any:
    return builder.or_(low.spread(), high.shifted_up().spread())


def _woven(builder: Any, first: Any, second: Any) -> Any:
    """The lanes of two vectors in turn."""
    from llvmlite import ir

    order = [_lane(lane + BLOCKS * half) for lane in range(BLOCKS) for half in range(2)]
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(ir.IntType(32), 2 * BLOCKS), order))
