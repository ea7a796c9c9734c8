"""How many steps were skipped, where only the device knows of it."""

from __future__ import annotations

from typing import Any

from rulec.arrays.library import Library
from rulec.language.node import Op


class SkippedThere:
    """The steps in which an update of a tensor on a device was skipped, counted there without waiting to hear of it.

    The count stays in one place, where steps that are captured and run again count on.
    """

    def __init__(self) -> None:
        self._now: list[tuple[Any, Library]] = []
        self._count: tuple[Any, Library] | None = None

    def note(self, some: Any, library: Library) -> None:
        """Notes a number on a device that is 1 where some tensor's update was skipped in this step, else 0."""
        self._now.append((some, library))

    def close(self) -> None:
        """Counts the step as skipped where one of its launches was."""
        if not self._now:
            return
        some, library = self._now[0]
        for other, _ in self._now[1:]:
            some = library.arithmetic[Op.MAXIMUM](some, library.numbers(other))
        self._now = []
        if self._count is None:
            self._count = library.copy(some), library
            return
        before, own = self._count
        own.write(before, before + own.numbers(some))

    def steps(self, host: Library) -> int:
        """How many there were. Waits for the device."""
        return 0 if self._count is None else int(host.numbers(self._count[0]))
