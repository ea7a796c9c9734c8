"""How a product of packed bits is cut into spans, and where the words of a convolution's kernel lie."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from rulec.backend.binary import Counts, Window

#: What a kernel is told: addresses, then sizes.
TABLE = (
    "inputs", "weights", "lines", "results", "kinds", "kind_of", "first",
    "samples", "places", "outputs", "input_words", "positions", "blocks", "block", "parts", "part",
)  # fmt: skip

#: The words of arranged weights that a pass over a block of outputs should find in a cache that is near.
_CACHED = 1 << 14

#: A block has at least so many outputs, and a multiple of them: some vectors of the widest kind.
_LEAST = 64

#: About how many words are multiplied in a span.
_SPAN = 1 << 18


@dataclass(frozen=True)
class Plan:
    """What the kernel is told beside the arrays.

    Positions of the results whose kernels have the same places inside the inputs are of one kind. `tables` are: a line
    for each kind, which says how many words are inside, how many bits, then how far each is from the first in the
    inputs, and which it is of the weights; the kind of each position; and where each position's kernel begins.
    `sizes` are those of the kernel's own table, `lines` and `spans` how many spans its two stages have.
    """

    tables: tuple[Counts, Counts, Counts]
    sizes: tuple[int, ...]
    lines: int
    spans: int

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of(cls, window: Window) -> Plan:
        """That of a convolution."""
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
    """How far each word of a kernel is from its first, in the inputs."""
    at = np.arange(window.kernel[0])[:, None] * window.size[1] + np.arange(window.kernel[1])
    return np.asarray((at[..., None] * window.words + np.arange(window.words)).reshape(-1))
