"""Small gradients that wait for each other: firing one costs more than updating it."""

from __future__ import annotations

#: Gradients of more bytes than this fire alone.
SMALL = 1 << 16

#: The part of the largest gradient that those waiting may take together.
_PART = 20


class Gather:
    """The places of gradients that are complete and wait, of together at most `room` bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.waiting: dict[int, int] = {}
        self._bytes = 0

    def takes(self, size: int) -> bool:
        """Whether a gradient of so many bytes waits for others."""
        return size <= SMALL and size <= self.room

    def add(self, place: int, size: int) -> list[int]:
        """Lets a gradient wait; the gradients to fire first where there is no room."""
        ready = self.take() if self._bytes + size > self.room else []
        self.waiting[place] = size
        self._bytes += size
        return ready

    def withdraw(self, place: int) -> None:
        """Takes out one that was not complete after all."""
        self._bytes -= self.waiting.pop(place)

    def take(self) -> list[int]:
        """All that wait; none does any more."""
        ready, self._bytes = sorted(self.waiting), 0
        self.waiting.clear()
        return ready


def room_for(largest: int) -> int:
    """How many bytes may wait where the largest gradient has so many."""
    return largest // _PART
