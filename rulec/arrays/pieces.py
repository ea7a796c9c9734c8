"""Arrays that lie one behind the other in one flat array, with one array for each tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Whole = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Cuts:
    """Where each array begins in the flat one, and the shape of each."""

    starts: Whole
    shapes: Sequence[tuple[int, ...]]

    @staticmethod
    def of(shapes: Sequence[tuple[int, ...]]) -> Cuts:
        """Arrays of these shapes without gaps between them."""
        sizes = np.array([math.prod(shape) for shape in shapes], np.int64)
        return Cuts(np.cumsum(sizes) - sizes, shapes)

    @cached_property
    def sizes(self) -> Whole:
        """The elements of each array."""
        return np.array([math.prod(shape) for shape in self.shapes], np.int64)

    def chosen(self, places: Sequence[int]) -> Cuts:
        """The arrays at these places."""
        return Cuts(self.starts[list(places)], [self.shapes[i] for i in places])


class Pieces(Sequence[Any]):
    """Arrays in one `flat` array of a library. Reading one of them makes a view."""

    def __init__(self, flat: Any, cuts: Cuts) -> None:
        self.flat, self.cuts = flat, cuts

    def __len__(self) -> int:
        return len(self.cuts.starts)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        start, size = int(self.cuts.starts[place]), int(self.cuts.sizes[place])
        return self.flat[start : start + size].reshape(self.cuts.shapes[place])

    def chosen(self, places: Sequence[int]) -> Pieces:
        """The arrays at these places, in the same memory."""
        return Pieces(self.flat, self.cuts.chosen(places))

    @property
    def byte_counts(self) -> Whole:
        """The bytes of each array."""
        return self.cuts.sizes * int(self.flat.itemsize)

    def addresses(self, first: int) -> Whole:
        """The address of each array, where the flat one begins at the address `first`."""
        return first + self.cuts.starts * int(self.flat.itemsize)
