"""The part of a tensor that a process has, and where its elements lie in the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: A float32 has so many bits: larger numbers of a part are two words.
_BITS = 24


@dataclass(frozen=True)
class Piece:
    """A part of a tensor.

    Element i of the part, in C order, is the element `start + i + gap*(i // width)` of the whole tensor, in C order.
    """

    start: int = 0
    width: int = 1
    gap: int = 0

    @property
    def words(self) -> dict[str, int]:
        """The numbers of the part in words of 24 bits, as facts of a tensor."""
        numbers = {"start": self.start, "width": self.width, "gap": self.gap}
        low = {f"{name}_low": number % (1 << _BITS) for name, number in numbers.items()}
        return low | {f"{name}_high": number >> _BITS for name, number in numbers.items()}


#: Ranges of indices, in order: of the rows of matrices, or of their columns.
Runs = tuple[tuple[int, int], ...]


def runs_of(shape: Sequence[int], indices: Sequence[Sequence[int]]) -> Runs:
    """The places in a tensor of this shape, in C order, of the elements with these indices along each dimension."""
    places = np.zeros(1, np.int64)
    for size, along in zip(shape, indices, strict=True):
        places = (places[:, None] * size + np.asarray(along, np.int64)).reshape(-1)
    if not len(places):
        return ()
    ends = np.flatnonzero(np.diff(places) != 1)
    starts, stops = [0, *(int(end) + 1 for end in ends)], [*(int(end) + 1 for end in ends), len(places)]
    return tuple((int(places[a]), int(places[b - 1]) + 1) for a, b in zip(starts, stops, strict=True))


def piece_of(whole: Sequence[int], part: Sequence[int], first: Sequence[int]) -> Piece | None:
    """The piece of a tensor of shape `whole` with shape `part` from the index `first` on.

    None where no piece says it: two dimensions are cut, and none of them is the first with several indices here.
    """
    here = math.prod(part)
    if not here:
        return Piece()
    strides = [math.prod(whole[axis + 1 :]) for axis in range(len(whole))]
    start = sum(at * stride for at, stride in zip(first, strides, strict=True))
    last = max((axis for axis, (n, m) in enumerate(zip(whole, part, strict=True)) if n != m), default=0)
    width = math.prod(part[last:])
    if here == width:
        return Piece(start)
    several = [axis for axis in range(last) if part[axis] > 1]
    if any(whole[axis] != part[axis] for axis in range(several[0] + 1, last)):
        return None
    return Piece(start, width, strides[last - 1] - width)
