"""The bytes alive at every moment of a step, by kind, and their peaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

#: The kinds of memory. `activations` are all that the model makes, their gradients among them; `gradients` those of
#: weights; `temporaries` what an optimizer makes and keeps in no state.
KINDS = ("weights", "gradients", "state", "activations", "temporaries")

Bytes = Mapping[str, int]


@dataclass(frozen=True)
class Account:
    """Bytes of each kind: at the `peak` of all, and at the peak of all kinds `beside` the activations.

    `most` has the peak of each kind by itself, and `gradient` the size of the largest gradient. The gradient of a
    weight that is used several times is a sum; it counts with all its parts, since they are alive together.
    """

    peak: Bytes
    beside: Bytes
    most: Bytes
    gradient: int

    @property
    def total(self) -> int:
        """The peak."""
        return sum(self.peak.values())

    @property
    def without_activations(self) -> int:
        """The peak of all but the activations."""
        return sum(self.beside.values()) - self.beside["activations"]

    def data(self) -> dict[str, object]:
        """The record as plain dicts and numbers."""
        return {
            "peak": self.total, "without_activations": self.without_activations, "largest_gradient": self.gradient,
            "at_peak": dict(self.peak), "beside_activations": dict(self.beside), "most": dict(self.most),
        }  # fmt: skip


class Timeline:
    """Pieces of memory in the order in which they come and go; their kinds may become known later.

    A piece of no kind is an activation.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._kinds: dict[int, str] = {}
        self._parts: dict[int, int] = {}
        self._in_place: set[int] = set()
        self._events: list[tuple[int, int]] = []
        self._start = 0

    def born(self, size: int, kind: str | None = None) -> int:
        """Adds a piece of `size` bytes, and returns its number."""
        self._sizes.append(size)
        number = len(self._sizes) - 1
        self._events.append((number, 1))
        if kind is not None:
            self._kinds[number] = kind
        return number

    def died(self, number: int, into: int | None = None) -> None:
        """The piece is free again; `into` is the piece, born last, that took its place."""
        at = len(self._events)
        if into is not None and self._events[-1] == (into, 1) and self._sizes[into] == self._sizes[number]:
            at -= 1
            self._in_place.add(into)
        self._events.insert(at, (number, -1))

    def kind(self, number: int) -> str | None:
        """The kind of a piece; None where it is not known yet."""
        return self._kinds.get(number)

    def joins(self, number: int, parts: int) -> None:
        """Notes that a gradient is the sum of `parts` parts."""
        self._parts[number] = parts

    def becomes(self, number: int, kind: str | None) -> None:
        """Sets the kind of a piece, from its beginning on."""
        if kind is None:
            self._kinds.pop(number, None)
        else:
            self._kinds[number] = kind

    def begin(self) -> None:
        """Starts the count of peaks here."""
        self._start = len(self._events)

    def account(self) -> Account:
        """The peaks since `begin`."""
        moments = list(self._moments())
        most = {kind: max(now[kind] for now in moments) for kind in KINDS}
        peak = max(moments, key=lambda now: sum(now.values()))
        beside = max(moments, key=lambda now: sum(now.values()) - now["activations"])
        return Account(peak, beside, most, self._largest_gradient())

    def _largest_gradient(self) -> int:
        born = {number for number, sign in self._events[self._start :] if sign > 0}
        gradients = [n for n, kind in self._kinds.items() if kind == "gradients" and n in born]
        return max((self._sizes[n] * self._copies(n) for n in gradients), default=0)

    def _copies(self, number: int) -> int:
        """The copies of a gradient while it is summed: its parts, and the sum unless it is one of them."""
        parts = self._parts.get(number, 1)
        return parts + 1 if parts > 1 and number not in self._in_place else parts

    def _moments(self) -> Iterator[dict[str, int]]:
        """The bytes alive of each kind, at the beginning and after every event from there on."""
        now = dict.fromkeys(KINDS, 0)
        for place, (number, sign) in enumerate(self._events):
            if place == self._start:
                yield dict(now)
            now[self._kinds.get(number, "activations")] += sign * self._sizes[number]
            if place >= self._start:
                yield dict(now)
        if self._start >= len(self._events):
            yield now
