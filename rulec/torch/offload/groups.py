"""Transfer groups: the parameters that travel together, each at its place in a transfer buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rulec.torch.groups.routes import Route
from rulec.torch.offload.ring import aligned


@dataclass(frozen=True)
class TransferGroup:
    """Tensors that travel together: their indices among the routes, and the offset of each in a buffer, in bytes.

    `whole` is False for one tensor that is larger than a buffer.
    """

    number: int
    places: tuple[int, ...]
    offsets: tuple[int, ...]
    bytes: int
    whole: bool = True


@dataclass
class _Open:
    """A group that takes more tensors."""

    places: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    bytes: int = 0

    def add(self, place: int, count: int) -> None:
        self.places.append(place)
        self.offsets.append(self.bytes)
        self.bytes += count


def transfer_groups(
    order: Iterable[int], sizes: Sequence[int], kinds: Callable[[int], Any], most: int
) -> list[TransferGroup]:
    """The groups of tensors in an order, each of at most `most` bytes unless it is one tensor.

    `sizes` are the bytes of each tensor. Tensors of one group have one kind, so that one kernel updates them.
    """
    groups: list[TransferGroup] = []
    opened: dict[Any, _Open] = {}

    def close(group: _Open) -> None:
        whole = group.bytes <= most or len(group.places) > 1
        groups.append(TransferGroup(len(groups), (*group.places,), (*group.offsets,), group.bytes, whole))

    for place in order:
        kind, count = kinds(place), aligned(sizes[place])
        group = opened.get(kind)
        if group is not None and group.bytes + count > most:
            close(group)
            group = None
        if group is None:
            group = opened[kind] = _Open()
        group.add(place, count)
    for group in opened.values():
        close(group)
    return groups


def kind_of(route: Route, engine: int) -> tuple[Any, ...]:
    """What tensors of one group have in common: their device, engine, rule and dtype, and whether they are matrices."""
    return str(route.here.device), engine, route.rule.name, route.here.dtype, route.here.dim() > 1
