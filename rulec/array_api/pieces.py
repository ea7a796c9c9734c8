"""Arrays of tensors in common memory: in one flat array one behind the other, or in stacks of equal shape.

Kernels get their addresses without a view of each.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
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
