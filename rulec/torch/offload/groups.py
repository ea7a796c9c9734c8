"""Transfer groups: the parameters that travel together, each at its place in a transfer buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rulec.runtime.buckets.launch import Launch
from rulec.runtime.buckets.reductions import LaunchShare
from rulec.torch.groups.engine import TensorRef
from rulec.torch.groups.offload import OffloadOptions
from rulec.torch.groups.routes import Route
from rulec.torch.offload.link import FakeLink, Link
from rulec.torch.offload.ring import aligned
from rulec.torch.tensors.fake import is_fake


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
class _Filling:
    """A group that may take more tensors."""

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

    `sizes` are the bytes of each tensor. Tensors of one group have one kind, so that one kernel updates them, and the
    groups of one kind follow each other.
    """
    of_kind: dict[Any, list[_Filling]] = {}
    for place in order:
        count = aligned(sizes[place])
        groups = of_kind.setdefault(kinds(place), [])
        if not groups or (groups[-1].places and groups[-1].bytes + count > most):
            groups.append(_Filling())
        groups[-1].add(place, count)
    filled = [group for groups in of_kind.values() for group in groups]
    return [
        TransferGroup(number, (*group.places,), (*group.offsets,), group.bytes, whole=group.bytes <= most)
        for number, group in enumerate(filled)
    ]


def links_of(
    routes: Sequence[Route], options: OffloadOptions, link_of: Callable[[torch.device, bool], Link]
) -> dict[torch.device, Link]:
    """The link of each device with parameters; `link_of` makes those of real ones."""
    here = {route.here.device: route.here for route in routes}
    return {d: FakeLink(d) if is_fake(x) else link_of(d, options.pinned) for d, x in here.items()}


def numbers_of(tensor_refs: Sequence[TensorRef]) -> dict[int, int]:
    """The numbers of the tensors of engines by their identity, in the order of a step without transfers."""
    engines = dict.fromkeys(engine for engine, _ in tensor_refs)
    tensors = [tensor for engine in engines for tensor in engine.tensors]
    return {id(tensor): number for number, tensor in enumerate(tensors)}


def note_shares(launches: Sequence[Launch], numbers: Mapping[int, int]) -> None:
    """Notes the launches that are parts of one, as it is in a step without transfers.

    `numbers` come from `numbers_of`: the tensors of a launch, and launches, are in their order.
    """
    tensors = [[numbers[id(tensor)] for tensor in launch.part.tensors] for launch in launches]
    firsts: dict[int, int] = {}
    for launch, mine in zip(launches, tensors, strict=True):
        key = id(launch.part.bucket)
        firsts[key] = min(firsts.get(key, mine[0]), *mine)
    for launch, mine in zip(launches, tensors, strict=True):
        bucket = launch.part.bucket
        outcome = next((decided for decided, v in bucket.versions.items() if v is launch.version), ())
        launch.share = LaunchShare((firsts[id(bucket)], outcome), mine)


def kind_of(route: Route, engine: int) -> tuple[Any, ...]:
    """What tensors of one group have in common: their device, engine, rule and dtype, and whether they are matrices."""
    return str(route.here.device), engine, route.rule.name, route.here.dtype, route.here.dim() > 1
