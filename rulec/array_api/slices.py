"""Slices of tensors: the elements of a local shard in the global tensor, and arrays of tensors in shared memory.

Arrays of several tensors lie in one flat array, one behind the other, or in stacks of equal shape. Kernels get their
addresses without a view of each.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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


class Together(Sequence[Any]):
    """One array for each tensor, in common memory. Reading one of them makes a view."""

    @property
    @abstractmethod
    def memory(self) -> Sequence[Any]:
        """The arrays that they lie in."""

    @property
    @abstractmethod
    def byte_counts(self) -> Whole:
        """The bytes of each."""

    @abstractmethod
    def addresses(self, address: Callable[[Any], int]) -> Whole:
        """The address of each, by a function for the address of an array."""


class Pieces(Together):
    """Arrays in one `flat` array of a library."""

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
    def memory(self) -> Sequence[Any]:
        """The flat array."""
        return (self.flat,)

    @property
    def byte_counts(self) -> Whole:
        """The bytes of each array."""
        return self.cuts.sizes * int(self.flat.itemsize)

    def addresses(self, address: Callable[[Any], int]) -> Whole:
        """The address of each array."""
        return address(self.flat) + self.cuts.starts * int(self.flat.itemsize)


class Stacks(Together):
    """Arrays in stacks of equal arrays: `places` has those of the tensors in each stack.

    `split` cuts a stack in equal parts. `shapes` has the shape of each array, by default that of a part.
    """

    def __init__(
        self, stacks: Sequence[Any], places: Sequence[Sequence[int]],
        split: Callable[[Any, int], Sequence[Any]], shapes: Sequence[tuple[int, ...]] = (),
    ) -> None:  # fmt: skip
        self.stacks, self.places, self._split, self._shapes = stacks, places, split, shapes
        self._parts: dict[int, Any] = {}
        self._stack_of = {place: number for number, each in enumerate(places) for place in each}

    def __len__(self) -> int:
        return len(self._stack_of)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        if place not in self._stack_of:
            raise IndexError(place)
        if place not in self._parts:
            number = self._stack_of[place]
            parts = self._split(self.stacks[number], len(self.places[number]))
            self._parts |= zip(self.places[number], parts, strict=True)
        part = self._parts[place]
        return part.reshape(self._shapes[place]) if self._shapes else part

    def stack_with(self, places: Sequence[int]) -> Any:
        """The stack of the arrays at these places and no others; None where there is none."""
        number = self._stack_of[places[0]]
        return self.stacks[number] if self.places[number] == places else None

    @property
    def memory(self) -> Sequence[Any]:
        """The stacks."""
        return self.stacks

    @property
    def byte_counts(self) -> Whole:
        """The bytes of each array."""
        counts = np.zeros(len(self), np.int64)
        for stack, places in zip(self.stacks, self.places, strict=True):
            counts[list(places)] = stack.nbytes // len(places)
        return counts

    def addresses(self, address: Callable[[Any], int]) -> Whole:
        """The address of each array, in contiguous stacks."""
        addresses, sizes = np.zeros(len(self), np.int64), self.byte_counts
        for stack, places in zip(self.stacks, self.places, strict=True):
            addresses[list(places)] = address(stack) + np.arange(len(places)) * sizes[places[0]]
        return addresses
