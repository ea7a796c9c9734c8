"""Binary layers of every backend: the arrays and sizes for a kernel, and the spans of a product of packed bits.

A convolution kernel's words get their indices here.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.array_api.random import WORD
from rulec.backend.capabilities import WORD_BITS, Bits, Counts, Window, words_of
from rulec.es.binary.kernels import contiguous
from rulec.es.streams import BITS, Stream


class PackedBits(ABC):
    """The kernels over the arrays of a `library`, NumPy or CuPy: see `rulec.backend.capabilities`."""

    def __init__(self, library: Any) -> None:
        self._arrays = library

    def convolve(self, inputs: Any, weights: Any, window: Window) -> Any:
        """2*(equal bits) - (all bits), int32 of shape `window.shape`."""
        results = self._arrays.empty(window.shape, np.int32)
        if results.size:
            self._multiply(inputs, weights, results, window)
        return results

    def draw(self, thresholds: Any, shape: Sequence[int], bits: Bits) -> Any:
        """Words (members, *shape[:-1], words): 1 where an element's word is below its threshold."""
        results = self._arrays.empty((bits.members, *shape[:-1], words_of(shape[-1])), np.uint64)
        seed, layer = Stream(bits.seed, bits.layer, bits.step, 0).key
        told = {
            "members": bits.members, "rows": math.prod(shape[:-1]), "count": int(shape[-1]), "words": results.shape[-1],
            "directions": bits.directions, "purpose": BITS, "step": bits.step & WORD, "seed": seed, "layer": layer,
        }  # fmt: skip
        self._draw(thresholds, results, told)
        return results

    def weighted_sum(self, words: Any, weights: Any, count: int) -> Any:
        """The sum over members of weight times bit, float64 (..., count)."""
        shape = words.shape[1:]
        sums = self._arrays.zeros((*shape, WORD_BITS))
        told = {"members": len(words), "total": math.prod(shape)}
        self._add(contiguous(words), self._arrays.asarray(weights), sums, told)
        return sums.reshape(*shape[:-1], shape[-1] * WORD_BITS)[..., :count]

    @abstractmethod
    def _multiply(self, inputs: Any, weights: Any, results: Any, window: Window) -> None:
        """Writes the results of a convolution, at least one."""

    @abstractmethod
    def _draw(self, thresholds: Any, results: Any, told: Mapping[str, int]) -> None:
        """Writes words of `told["rows"]` lines of `told["count"]` bits for each member."""

    @abstractmethod
    def _add(self, words: Any, weights: Any, sums: Any, told: Mapping[str, int]) -> None:
        """Adds the bits of members, `told["total"]` words of each, to sums of zero."""


#: The table of a kernel: addresses, then sizes.
TABLE = (
    "inputs", "weights", "lines", "results", "kinds", "kind_of", "first",
    "samples", "places", "outputs", "input_words", "positions", "blocks", "block", "parts", "part",
)  # fmt: skip

#: The words of arranged weights in a pass over a block of outputs, for a near cache.
_CACHED = 1 << 14

#: The outputs of a block are a multiple of this: some vectors of the widest kind.
_LEAST = 64

#: The approximate number of words in a span.
_SPAN = 1 << 18


@dataclass(frozen=True)
class Plan:
    """The tables and sizes of a product, beside its arrays.

    Two positions of the results are of one kind if the same places of their kernels are inside the inputs. The first of
    `tables` has a line for each kind: the number of words inside, the number of bits, the distance of each word from
    the first in the inputs, and its place in the weights. The second has the kind of each position, the third the place
    of each position's first word. `sizes` are for the kernel's table. `lines` and `spans` are the numbers of spans of
    its two stages.
    """

    tables: tuple[Counts, Counts, Counts]
    sizes: tuple[int, ...]
    lines: int
    spans: int

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of(cls, window: Window) -> Plan:
        """The plan of a convolution."""
        places = window.kernel[0] * window.kernel[1] * window.words
        positions = window.out[0] * window.out[1]
        block = min(window.outputs, max(_LEAST, _CACHED // places // _LEAST * _LEAST))
        part = max(1, min(window.samples * positions, _SPAN // (places * block)))
        blocks, parts = -(-window.outputs // block), -(-window.samples * positions // part)
        inputs = window.size[0] * window.size[1] * window.words
        sizes = (window.samples, places, window.outputs, inputs, positions, blocks, block, parts, part)
        return cls(_tables(window, places), sizes, window.members * places, window.members * parts * blocks)


def _tables(window: Window, places: int) -> tuple[Counts, Counts, Counts]:
    height, rows = np.unique(window.inside(0), axis=0, return_inverse=True)
    width, columns = np.unique(window.inside(1), axis=0, return_inverse=True)
    kinds = np.zeros((len(height) * len(width), 2 + 2 * places), np.int64)
    for number, line in enumerate(kinds):
        taps = np.outer(height[number // len(width)], width[number % len(width)])
        inside = np.flatnonzero(np.repeat(taps, window.words))
        line[:2] = len(inside), taps.sum() * window.bits
        line[2 : 2 + len(inside)] = _offsets(window)[inside]
        line[2 + places : 2 + places + len(inside)] = inside
    kind_of = (rows.reshape(-1, 1) * len(width) + columns.reshape(-1)).reshape(-1)
    first = (window.first(0)[:, None] * window.size[1] + window.first(1)).reshape(-1) * window.words
    return kinds, kind_of.astype(np.int64), first.astype(np.int64)


def _offsets(window: Window) -> Counts:
    """The distance of each word of a kernel from its first, in the inputs."""
    at = np.arange(window.kernel[0])[:, None] * window.size[1] + np.arange(window.kernel[1])
    return np.asarray((at[..., None] * window.words + np.arange(window.words)).reshape(-1))
