"""The report of a step, for people who want to see their gradients gone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Report:
    """The last step of an eager optimizer.

    Numbers of parameters: `fired` were updated inside the backward pass, `deferred` in `step()`; `untouched` had no
    gradient, and of `dropped` the update was given up, for an infinite gradient. Bytes: `bytes_freed` of gradients
    freed inside the backward pass, `peak_gradient_bytes` of all gradients at the fullest time, `largest_gradient_bytes`
    of the largest gradient, and `journal_bytes` of parameters and states kept for a rollback. `launches` is how often
    parameters fired: small ones do together.
    """

    fired: int = 0
    deferred: int = 0
    untouched: int = 0
    dropped: int = 0
    launches: int = 0
    bytes_freed: int = 0
    peak_gradient_bytes: int = 0
    largest_gradient_bytes: int = 0
    journal_bytes: int = 0

    def __str__(self) -> str:
        rows = [
            ("fired", f"{self.fired} parameters, in {self.launches} launches"),
            ("deferred", f"{self.deferred}"),
            ("untouched", f"{self.untouched}"),
            *([("dropped", f"{self.dropped}")] if self.dropped else []),
            ("gradients freed", _bytes(self.bytes_freed)),
            ("gradients at most", _bytes(self.peak_gradient_bytes)),
            ("largest gradient", _bytes(self.largest_gradient_bytes)),
            *([("kept for rollback", _bytes(self.journal_bytes))] if self.journal_bytes else []),
        ]
        width = max(len(head) for head, _ in rows)
        return "\n".join(f"{head:{width}}  {text}" for head, text in rows)


def _bytes(count: int) -> str:
    """Bytes in the largest unit of which there is one."""
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"


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
