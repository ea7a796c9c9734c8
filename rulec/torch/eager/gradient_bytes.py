"""The memory of gradients in a step, counted as they come and go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class GradientBytes:
    """Bytes of the gradients that are held, by place; `sizes` are the bytes of each.

    A gradient is held from its first arrival until it is freed. What is held otherwise, such as a tile, is `lent`.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._held: set[int] = set()
        self.live = self.peak = self.largest = self.freed = 0

    def arrive(self, place: int) -> None:
        """A gradient is there, or more was added to it."""
        if place not in self._held:
            self._held.add(place)
            size = self._sizes[place]
            self.live += size
            self.largest = max(self.largest, size)
            self.peak = max(self.peak, self.live)

    def lend(self, size: int) -> None:
        """So many bytes of a gradient were there for a moment, beside the held ones."""
        self.largest = max(self.largest, size)
        self.peak = max(self.peak, self.live + size)

    def leave(self, places: Iterable[int], inside: bool = True) -> None:
        """Gradients are gone; where `inside` the backward pass, they count as freed."""
        for place in places:
            size = self._sizes[place]
            if place in self._held:
                self._held.remove(place)
                self.live -= size
            self.freed += size * inside
