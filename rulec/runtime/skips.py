"""The number of skipped steps, counted on the device."""

from __future__ import annotations

from typing import Any

from rulec.arrays.library import Library
from rulec.language.node import Op


class SkippedThere:
    """The number of steps with a skipped update of a tensor on a device, counted there; the host does not wait.

    The count stays in one place of memory, so that replays of a captured step advance it.
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
        before, counting = self._count
        counting.write(before, before + counting.numbers(some))

    def steps(self, host: Library) -> int:
        """The count of such steps. Waits for the device."""
        return 0 if self._count is None else int(host.numbers(self._count[0]))
