"""The code of a value without a search among the thresholds: by one look into a small table, or by straight lines.

With straight lines, one comparison completes the code.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rulec.formats.format import Format
from rulec.formats.tables import Floats, thresholds, zero

#: float32 bits of 1.0.
_ONE = 0x3F800000


@dataclass(frozen=True, eq=False)
class Steps:
    """Cells of floats with the same upper bits, none with more than one threshold. For the bits of y as uint32:

        cell = min(max((bits & 0x7FFFFFFF) >> shift, low), low + cells - 1) - low
        cell = cell + cells where the sign bit is set (signed formats alone)
        code = first[cell] + (y > threshold[cell])

    `first` is uint8 and `threshold` float32; both have `cells` entries, or twice as many for signed formats. The
    threshold is infinity where a cell has none. The first cell begins at 0 and the last ends at infinity.
    """

    shift: int
    low: int
    cells: int
    first: NDArray[np.uint8]
    threshold: Floats

    def code(self, y: Floats) -> NDArray[np.uint8]:
        """uint8 codes of float32 values, in their shape. NaN gets some code."""
        bits = y.view(np.uint32)
        cell = ((bits & np.uint32(0x7FFFFFFF)) >> np.uint32(self.shift)).astype(np.int64)
        cell = np.clip(cell, self.low, self.low + self.cells - 1) - self.low
        if self.first.size > self.cells:
            cell = cell + np.where(bits >> np.uint32(31), self.cells, 0)
        return (self.first[cell] + (y > self.threshold[cell])).astype(np.uint8)

    def entries(self, none: int | None = None) -> NDArray[np.uint32]:
        """One number for each cell, of its first code and the lower bits of its threshold. For the bits of y as uint32:

            low = max(bits & 0x7FFFFFFF, low << shift) & (2**shift - 1), or minus that where the sign bit is set
            code = (entries[cell] + low) >> shift

        If `none` is the code of zero, zero and what is above it have no lower code than the next one.
        """
        below = np.arange(self.first.size) >= self.cells
        mask, first = (1 << self.shift) - 1, self.first.astype(np.int64)
        limits = np.abs(self.threshold).view(np.uint32).astype(np.int64) & mask
        limits = np.where(np.isinf(self.threshold), np.where(below, 0, mask), limits)
        entries = np.where(below, (first + 1 << self.shift) + limits - 1, (first << self.shift) + mask - limits)
        if none is not None:
            entries = np.where(below, entries, np.maximum(entries, none + 1 << self.shift))
        return entries.astype(np.uint32)


def steps(format: Format) -> Steps:
    """The look-up of dynamic8 or dynamic4 with the largest possible shift, and so with the fewest cells."""
    return _steps(format.name, format.signed, thresholds(format).tobytes())


@functools.cache
def _steps(name: str, signed: bool, limits: bytes) -> Steps:
    """The look-up for these thresholds."""
    between = np.frombuffer(limits, np.float32)
    shift = max(shift for shift in range(31) if _is_fine(between, shift))
    low = int(np.abs(between).view(np.uint32).min()) >> shift
    cells = (_ONE >> shift) - low + 1
    edges = (np.arange(low, low + cells + 1, dtype=np.uint32) << np.uint32(shift)).view(np.float32).copy()
    edges[0], edges[-1] = 0, np.inf
    rows = [(np.searchsorted(between, edges[:-1], "left"), np.searchsorted(between, edges[1:], "left"))]
    if signed:
        rows.append((np.searchsorted(between, -edges[1:], "right"), np.searchsorted(between, -edges[:-1], "right")))
    first, last = (np.concatenate(side) for side in zip(*rows, strict=True))
    threshold = np.append(between, np.float32(np.inf))[np.where(last > first, first, between.size)]
    return Steps(shift, low, cells, first.astype(np.uint8), threshold)


def _is_fine(between: Floats, shift: int) -> bool:
    """Whether no two thresholds of one sign share a cell."""
    cells = between.view(np.uint32) >> np.uint32(shift)
    return np.unique(cells).size == cells.size


#: Exponents, and fractions of the first of them, of the magnitudes in a table. Those of unsigned dynamic4 are evenly
#: spaced.
_DECADES = {("dynamic8", True): (7, 1), ("dynamic8", False): (7, 2), ("dynamic4", True): (3, 1)}


@dataclass(frozen=True, eq=False)
class Lines:
    """Lines whose lowest tells the nearest threshold of a magnitude. For y that is not NaN:

        place = max(0, min(slope*abs(y) + start, for each line))
        index = first + rint(place), or where the sign bit is set first - 1 - rint(place)
        code = index - (y <= below[index])

    Numbers of thresholds grow evenly within each power of ten, and slower in greater ones. `lines` has float32 slopes
    and starts; a sum may be rounded once or twice. `below` is -infinity and then the thresholds, float32 of shape
    (2**bits,): below a code is the threshold at its index.
    """

    lines: tuple[tuple[np.float32, np.float32], ...]
    first: int
    below: Floats

    def code(self, y: Floats) -> NDArray[np.uint8]:
        """uint8 codes of float32 values from -1 to 1, in their shape, or from 0 where codes have no sign."""
        places = [slope * np.abs(y) + start for slope, start in self.lines]
        step = np.rint(np.maximum(functools.reduce(np.minimum, places), 0)).astype(np.int64)
        index = self.first + np.where(np.signbit(y), -1 - step, step)
        codes: NDArray[np.uint8] = (index - (y <= self.below[index])).astype(np.uint8)
        return codes


@functools.cache
def lines(format: Format) -> Lines:
    """The lines of dynamic8 or dynamic4."""
    below = np.append(np.float32(-np.inf), thresholds(format))
    code = zero(format) if format.signed else None
    first = 1 if code is None else code + 1
    if (format.name, format.signed) not in _DECADES:
        return Lines(((np.float32(16), np.float32(-1.6)),), first, below)
    exponents, fractions = _DECADES[format.name, format.signed]
    counts = [fractions * 2**i for i in range(exponents)]
    slopes = [count / 0.9 * 10.0 ** (exponents - i - 1) for i, count in enumerate(counts)]
    starts = [count - fractions - count / 9 for count in counts]
    return Lines(tuple(zip(map(np.float32, slopes), map(np.float32, starts), strict=True)), first, below)
