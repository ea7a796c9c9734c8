"""The code of a value by straight lines and one comparison, without a search among the thresholds."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rulec.formats.format import Format
from rulec.formats.tables import Floats, thresholds, zero

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
