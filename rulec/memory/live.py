"""The bytes alive at every moment of a step, by place and kind, and their peaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

#: The kinds of memory. `activations` are all that the model makes, their gradients among them; `gradients` those of
#: weights; `transfers` the transfer buffers of an offload; `temporaries` what an optimizer makes and keeps in no state.
KINDS = ("weights", "gradients", "state", "activations", "transfers", "temporaries")

Bytes = Mapping[str, int]


def _nothing() -> Bytes:
    return dict.fromkeys(KINDS, 0)


@dataclass(frozen=True)
class Account:
    """Bytes of each kind on the device: at the `peak` of all, and at the peak of all kinds `beside` the activations.

    `most` has the peak of each kind by itself, and `gradient` the size of the largest gradient. The gradient of a
    weight that is used several times is a sum; it counts with all its parts, since they are alive together.
    `host` has the bytes of each kind on the host, at the peak of the host, and zeros where device and host are one
    place. `down` is the number of bytes copied from the device to the host, and `up` from the host to the device.
    """

    peak: Bytes
    beside: Bytes
    most: Bytes
    gradient: int
    host: Bytes = field(default_factory=_nothing)
    down: int = 0
    up: int = 0

    @property
    def total(self) -> int:
        """The peak on the device."""
        return sum(self.peak.values())

    @property
    def host_total(self) -> int:
        """The peak on the host."""
        return sum(self.host.values())

    @property
    def without_activations(self) -> int:
        """The peak of all but the activations."""
        return sum(self.beside.values()) - self.beside["activations"]

    @property
    def moved(self) -> str:
        """What was copied between the device and the host, in words."""
        unit, size = self._unit
        down, up = amount(self.down, size), amount(self.up, size)
        return f"copied: {down} {unit} from the device to the host, {up} {unit} from the host to the device"

    @property
    def _unit(self) -> tuple[str, int]:
        return ("GiB", 2**30) if max(self.total, self.host_total) >= 2**30 else ("MiB", 2**20)

    def table(self, activations: bool = True) -> tuple[str, list[list[str]]]:
        """The unit, and rows of text: headings, then the device, and the host where something is there.

        Without `activations` these are not known, and neither is the peak without them.
        """
        unit, size = self._unit
        rows = [("at the peak", self.peak, True), ("most of each", self.most, False)]
        if activations:
            rows.insert(1, ("most without activations", {**self.beside, "activations": 0}, True))
        if self.host_total:
            rows.append(("on the host", self.host, True))
        shown = [kind for kind in KINDS if kind != "transfers" or any(kinds[kind] for _, kinds, _ in rows)]
        return unit, [["", *shown, "all"]] + [
            [name, *(amount(kinds[kind], size) for kind in shown), amount(sum(kinds.values()), size) if summed else ""]
            for name, kinds, summed in rows
        ]

    def data(self) -> dict[str, object]:
        """The record as plain dicts and numbers."""
        return {
            "peak": self.total, "without_activations": self.without_activations, "largest_gradient": self.gradient,
            "at_peak": dict(self.peak), "beside_activations": dict(self.beside), "most": dict(self.most),
            "host_peak": self.host_total, "host": dict(self.host), "down": self.down, "up": self.up,
        }  # fmt: skip


def amount(count: int, unit: int) -> str:
    """A number of bytes in a unit of so many."""
    return f"{count / unit:.3f}" if count < unit else f"{count / unit:.2f}"


class Timeline:
    """Pieces of memory in the order in which they come and go; their kinds may become known later.

    A piece of no kind is an activation. An event is a piece and the change of the bytes alive.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._on_host: set[int] = set()
        self._kinds: dict[int, str] = {}
        self._parts: dict[int, int] = {}
        self._in_place: set[int] = set()
        self._events: list[tuple[int, int]] = []
        self._start = 0
        self._down = self._up = 0

    def born(self, size: int, kind: str | None = None, on_host: bool = False) -> int:
        """Adds a piece of `size` bytes, on the device or on the host, and returns its number."""
        self._sizes.append(size)
        number = len(self._sizes) - 1
        self._events.append((number, size))
        if on_host:
            self._on_host.add(number)
        if kind is not None:
            self._kinds[number] = kind
        return number

    def died(self, number: int, into: int | None = None) -> None:
        """The piece is free again; `into` is the piece, born last, that took its place."""
        at = len(self._events)
        if into is not None and self._events[-1] == (into, self._sizes[number]):
            at -= 1
            self._in_place.add(into)
        self._events.insert(at, (number, -self._sizes[number]))

    def resized(self, number: int, size: int) -> None:
        """Notes the size of a piece, where it is another than before."""
        if size != self._sizes[number]:
            self._events.append((number, size - self._sizes[number]))
            self._sizes[number] = size

    def on_host(self, number: int) -> bool:
        """Whether a piece is on the host."""
        return number in self._on_host

    def copied(self, size: int, down: bool) -> None:
        """Counts bytes copied down, from the device to the host, or up."""
        if down:
            self._down += size
        else:
            self._up += size

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
        self._down = self._up = 0

    def account(self) -> Account:
        """The peaks since `begin`."""
        moments, on_host = (list(self._moments(host)) for host in (False, True))
        most = {kind: max(now[kind] for now in moments) for kind in KINDS}
        peak = max(moments, key=lambda now: sum(now.values()))
        beside = max(moments, key=lambda now: sum(now.values()) - now["activations"])
        host = max(on_host, key=lambda now: sum(now.values()))
        return Account(peak, beside, most, self._largest_gradient(), host, self._down, self._up)

    def _largest_gradient(self) -> int:
        born = {number for number, change in self._events[self._start :] if change > 0}
        gradients = [n for n, kind in self._kinds.items() if kind == "gradients" and n in born]
        return max((self._sizes[n] * self._copies(n) for n in gradients), default=0)

    def _copies(self, number: int) -> int:
        """The copies of a gradient while it is summed: its parts, and the sum unless it is one of them."""
        parts = self._parts.get(number, 1)
        return parts + 1 if parts > 1 and number not in self._in_place else parts

    def _moments(self, host: bool) -> Iterator[dict[str, int]]:
        """The bytes alive of each kind in a place, at the beginning and after every event there from then on."""
        now = dict.fromkeys(KINDS, 0)
        for place, (number, change) in enumerate(self._events):
            if place == self._start:
                yield dict(now)
            if (number in self._on_host) is host:
                now[self._kinds.get(number, "activations")] += change
                if place >= self._start:
                    yield dict(now)
        if self._start >= len(self._events):
            yield now
