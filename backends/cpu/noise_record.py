"""Noise for the cpu backend's kernels: the words of a record, and the sizes of tiles and batches of words."""

from __future__ import annotations

from ..common.noise import RECORD

#: Positions in a record. Each direction has two words: its number, and its weight as a float64.
DIRECTIONS, COUNT, HIGH, STEP, OFFSET = (
    RECORD.index(name) for name in ("directions", "count", "high", "step", "offset")
)
KEY = RECORD.index("seed")  # the first of two words

#: Elements of a tile, the part of a gradient in memory at a time: with its random words it fits in the nearest cache,
#: and leaves room there.
TILE = 2048

#: Words made together, and the elements that they serve, by kind of values.
BATCH_WORDS = 32
BATCH = {"raw": 32, "normal": 32, "rademacher": 1024, "popcount": 128}
