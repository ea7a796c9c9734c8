"""Transfer groups: the parameters that travel together, each at its place in a transfer buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rulec.compiler.layout import scale_name
from rulec.runtime.buckets.launch import Launch
from rulec.runtime.buckets.reductions import LaunchShare
from rulec.torch.groups.engine import TensorRef
from rulec.torch.groups.options import OffloadOptions
from rulec.torch.groups.routes import Route
from rulec.torch.offload.link import FakeLink, Link
from rulec.torch.offload.ring import aligned, bytes_of
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
    bound: int = 0

    def add(self, place: int, count: int, bound: int) -> None:
        self.places.append(place)
        self.offsets.append(self.bytes)
        self.bytes += count
        self.bound += bound


def transfer_groups(
    order: Iterable[int], sizes: Sequence[int], kinds: Callable[[int], Any], most: int, bounds: Sequence[int]
) -> list[TransferGroup]:
    """The groups of tensors in an order, each of at most `most` bytes unless it is one tensor.

    `sizes` are the bytes of each tensor here. Groups are cut by `bounds`, which all ranks have alike: see
    `largest_shard`. Tensors of one group have one kind, so that one kernel updates them, and the groups of one kind
    follow each other.
    """
    of_kind: dict[Any, list[_Filling]] = {}
    for place in order:
        bound = aligned(bounds[place])
        groups = of_kind.setdefault(kinds(place), [])
        if not groups or (groups[-1].places and groups[-1].bound + bound > most):
            groups.append(_Filling())
        groups[-1].add(place, aligned(sizes[place]), bound)
    filled = [group for groups in of_kind.values() for group in groups]
    return [
        TransferGroup(
            number, (*group.places,), (*group.offsets,), group.bytes,
            whole=group.bytes <= most or len(group.places) > 1,
        )
        for number, group in enumerate(filled)
    ]  # fmt: skip


def largest_shard(ref: TensorRef) -> int | None:
    """The elements of a DTensor in the rank with the most; None for a tensor that is no shard.

    Ranks with shards of other sizes so cut the same groups: their launches are compared, and reduce together.
    """
    engine, i = ref
    whole = engine.tensors[i].whole
    if whole is None:
        return None
    shape = [*whole.shape]
    for dimension, rank_group in whole.cuts:
        shape[dimension] = -(-shape[dimension] // rank_group.size)
    return math.prod(shape)


def largest_states(ref: TensorRef, homes: Mapping[str, Tensor]) -> int:
    """The bytes of a tensor's states; of a DTensor's, a number that is the same in all ranks: see `largest_shard`.

    Arrays of the shape of the shard count as in the rank with the most elements, and others as of the whole tensor.
    """
    engine, i = ref
    tensor, most = engine.tensors[i], largest_shard(ref)
    bucket = tensor.bucket
    if most is None or bucket is None:
        return sum(aligned(bytes_of(home)) for home in homes.values())
    formats = dict(bucket.layout.formats)
    scales = {scale_name(name): form for name, form in formats.items()}
    view, total = tensor.view.whole or tensor.view, 0
    extents = {"b": view.batch, "i": view.rows, "j": view.cols}
    for name, home in homes.items():
        if name in formats:
            count = most * formats[name].bits // 8
        elif name in scales:
            count = -(-most // scales[name].block)
        elif name in tensor.shapes:
            count = math.prod(tensor.shapes[name])
        elif bucket.program.buffer(name).axes.elementwise:
            count = most
        else:
            letters = bucket.program.buffer(name).axes.letters
            count = math.prod(extent for letter, extent in extents.items() if letter in letters)
        total += aligned(count * home.element_size())
    return total


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
