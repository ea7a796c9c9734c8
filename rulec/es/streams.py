"""The random streams of perturbations: Philox4x32-10, by seed, layer, purpose, direction, step and element.

Key: (seed, layer + 2**31); the top bit keeps these streams apart from the streams of rules. Counter: (block, its high
part and the purpose, direction, step). A block is four words; the kind of noise decides how many elements it serves.
The words are the same on every backend, bit for bit; this is the reference of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rulec.array_api.random import Words, philox, uniform

Numbers = np.ndarray[Any, np.dtype[np.int64]]

#: What a stream is for: elements of noise, rows, columns, bits of weights, the ring of a dropout, and the signs of
#: directions, which are numbers of one stream that they share.
NOISE, ROWS, COLUMNS, BITS, DROPPED, SIGNS = range(6)

#: The direction of noise that all directions of a step share.
SHARED = 2**32 - 1

#: The bit of the key's second word that no rule's tensor has.
DOMAIN = 2**31

#: How many elements a block of four words serves.
ELEMENTS = {"raw": 4, "normal": 4, "rademacher": 128, "popcount": 16}

#: What the whole numbers of a kind are multiplied by, for a variance of 1.
SCALE = {"normal": 1.0, "rademacher": 1.0, "popcount": 0.5**0.5}

#: Significant bits of short weights: their products with whole numbers up to 4 are exact in float32.
SHORT = 20


@dataclass(frozen=True)
class Stream:
    """One stream: the arguments of its words, except for the element's number."""

    seed: int
    layer: int
    step: int
    pair: int = SHARED
    purpose: int = NOISE

    #: A library of NumPy's names, its integers, and its numbers of noise.
    xp, integer, number = np, np.int64, np.float64

    def of(self, pair: int, purpose: int | None = None) -> Stream:
        """The stream of another direction, and for another purpose."""
        return replace(self, pair=pair, purpose=self.purpose if purpose is None else purpose)

    @property
    def key(self) -> tuple[int, int]:
        """The key of the generator."""
        return self.seed & 0xFFFFFFFF, (self.layer + DOMAIN) & 0xFFFFFFFF

    def blocks(self, first: int, count: int) -> Words:
        """Blocks `first` and on, as (count, 4) words."""
        block = np.arange(first, first + count, dtype=np.uint64)
        high = (block >> np.uint64(32)) | np.uint64(self.purpose << 16)
        counter = (block & np.uint64(0xFFFFFFFF), high, self.pair, self.step & 0xFFFFFFFF)
        return np.stack(philox(counter, self.key), axis=-1)

    def words(self, count: int, offset: Any = 0) -> Any:
        """One word for each of `count` elements from `offset` on."""
        return self._elements("raw", count, offset)

    def whole(self, kind: str, count: int, offset: Any = 0) -> Any:
        """The whole numbers of rademacher (1, -1) or popcount (-4 to 4) noise of elements from `offset` on."""
        parts = self._elements(kind, count, offset).astype(self.integer)
        return 1 - 2 * parts if kind == "rademacher" else self.xp.bitwise_count(parts).astype(self.integer) - 4

    def values(self, kind: str, count: int, offset: Any = 0) -> Any:
        """Noise of mean 0 and variance 1, in float64, of elements from `offset` on."""
        if kind != "normal":
            return self.whole(kind, count, offset).astype(self.number) * SCALE[kind]
        pairs, before = _begin(offset, 2)
        words = self.words(count + before + 1 & ~1, 2 * pairs).reshape(-1, 2)
        return self.xp.stack(self.normals(words), axis=-1).reshape(-1)[before:][:count]

    def normals(self, words: Any) -> tuple[Any, Any]:
        """Two standard normal numbers from each pair of words (n, 2), by Box and Muller's method."""
        u = uniform(words)
        radius, angle = np.sqrt(-2.0 * np.log(u[:, 0])), 2.0 * np.pi * u[:, 1]
        return radius * np.cos(angle), radius * np.sin(angle)

    def signs(self, count: int) -> Any:
        """A sign for each of `count` lines, 1 or -1."""
        return self.whole("rademacher", count)

    def permutation(self, count: int) -> Any:
        """The order of `count` lines that sorts their words, equal ones in their old order."""
        return self.xp.argsort(self.words(count), stable=True).astype(self.integer)

    def _elements(self, kind: str, count: int, offset: Any) -> Any:
        """The word, byte or bit of each element, the lowest bits of a word first."""
        each = ELEMENTS[kind]
        first, before = _begin(offset, each)
        parts = self.blocks(first, -(-(before + count) // each))
        if each > 4:
            size = 128 // each
            shifts = self.xp.arange(0, 32, size, dtype=self.xp.uint32)
            parts = (parts[..., None] >> shifts) & self.xp.uint32((1 << size) - 1)
        return parts.reshape(-1)[before:][:count]


def _begin(offset: Any, each: int) -> tuple[Any, int]:
    """The part, of `each` elements, that an offset lies in, and how many of its elements come before: traced, none."""
    return divmod(offset, each) if isinstance(offset, int) else (offset // each, 0)


def short_weights(weights: Any, values: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Weights of directions as kernels take them: with the values' scale, in float32, with few significant bits.

    The product of one with a whole number of noise is then exact, and sums of such products are the same bits whether
    or not a multiplication is fused with an addition.
    """
    return np.asarray(shortened(np.asarray(weights, np.float64), values, np), np.float32)


def shortened(weights: Any, values: str, xp: Any) -> Any:
    """The same in the dtype of the weights, by a library `xp` of NumPy's names."""
    scaled = weights * SCALE[values]
    if values == "normal":
        return scaled
    fraction, exponent = xp.frexp(scaled)
    return xp.ldexp(xp.rint(fraction * 2.0**SHORT), exponent - SHORT)
