"""Noise as a kernel reads it: a record of 64-bit words, whose address stands where a gradient's would."""

from __future__ import annotations

from typing import Any

import numpy as np

from rulec.backend.noise import Noise

#: Positions in a record. Behind them each direction that counts has two: its number, and its weight as a float64.
KEY, HIGH, STEP, OFFSET, COUNT, DIRECTIONS = 0, 2, 3, 4, 5, 6

#: Elements of a tile, the part of a gradient that there is at once: with the words it is made of it fits in the
#: nearest cache, and leaves room there.
TILE = 2048

#: Words that are made together, and the elements that they serve.
BATCH_WORDS = 32
BATCH = {"normal": 32, "rademacher": 1024, "popcount": 128}

Record = np.ndarray[Any, np.dtype[np.int64]]


def record(noise: Noise, offset: int = 0) -> Record:
    """The record of noise for an array that begins at element `offset`."""
    pairs, weights = noise.counted
    found = np.empty(DIRECTIONS + 2 * len(pairs), np.int64)
    found[:DIRECTIONS] = [*noise.key, noise.high, noise.step & 0xFFFFFFFF, offset, len(pairs)]
    found[DIRECTIONS::2] = pairs & 0xFFFFFFFF
    found[DIRECTIONS + 1 :: 2] = weights.astype(np.float64).view(np.int64)
    return found
