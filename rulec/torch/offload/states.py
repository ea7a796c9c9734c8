"""`offload="states"`: states lie on the host and stream through the device; the step is the device's.

Tensors travel in transfer groups, each with its place in one buffer of a ring in device memory. The states of a group
are copied up while the group before it is computed, and copied down while the group after it is. A place is the same in
every step, so kernels are bound once. The kernels, their order and their bits are those of a step without offload.

The host waits for nothing before the end of a step; then all states are on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rulec.language.rule_data import RuleData
from rulec.runtime.buckets.launch import Launch
from rulec.runtime.storage.allocator import StateSpec
from rulec.torch.groups.engine import TensorRef, TorchEngine
from rulec.torch.groups.options import OffloadOptions
from rulec.torch.groups.routes import Route
from rulec.torch.offload.device_ring import BUFFERS, BufferOwner, DeviceRing
from rulec.torch.offload.groups import TransferGroup, largest_states, links_of, note_shares, numbers_of, transfer_groups
from rulec.torch.offload.link import Link, link_of
from rulec.torch.offload.program_states import StageStates, states_written, takes_pieces, wanted_states
from rulec.torch.offload.ring import aligned, bytes_of
from rulec.torch.offload.state_pieces import CutStates, StatePieces, placed
from rulec.torch.tensors.fake import plain_memory
from rulec.torch.tensors.tensors import TorchArrays


class HomeArrays(TorchArrays):
    """Tensors with states in host memory for the link of their device; `links` are by device."""

    def __init__(self, links: Mapping[torch.device, Link]) -> None:
        self._links = links

    def allocate(
        self, params: Sequence[Tensor], specs: Sequence[StateSpec], shapes: Sequence[Sequence[tuple[int, ...]]],
        hyper: Sequence[Mapping[str, float]], facts: Sequence[Mapping[str, float]],
    ) -> list[dict[str, Tensor]]:  # fmt: skip
        """Allocates the states of each parameter on the host, one after the other."""
        reads = any(spec.copies_parameter or spec.reads_parameter for spec in specs)
        homes: list[dict[str, Tensor]] = []
        for param, state_shapes, named, known in zip(params, shapes, hyper, facts, strict=True):
            link, homes_here = self._links[param.device], dict[str, Tensor]()
            with plain_memory():
                values = torch.empty_like(param, device="cpu")
                if reads:
                    values.copy_(param)
            for spec, shape in zip(specs, state_shapes, strict=True):
                (first,) = super().allocate([values], [spec], [[shape]], [named], [known])
                homes_here[spec.name] = _at_home(first[spec.name], link)
            homes.append(homes_here)
        return homes


def _at_home(state: Tensor, link: Link) -> Tensor:
    """A state in memory of its own that the link's device reads and writes."""
    with plain_memory():
        memory = link.host_memory(bytes_of(state)).untyped_storage()
        return state.new_empty(0).set_(memory, 0, state.shape, state.stride()).copy_(state)


@dataclass(eq=False)
class _Load(BufferOwner):
    """The states of a launch: by name, pairs of a tensor in a transfer buffer and its home on the host.

    `coming` has the names of states in the buffer, or on their way to it.
    """

    launch: Launch
    turn: int
    ring: DeviceRing
    states: dict[str, list[tuple[Tensor, Tensor]]]
    coming: set[str] = field(default_factory=set)

    @property
    def here(self) -> bool:
        """Whether the buffer is this launch's."""
        return self.ring.is_of(self.turn, self)

    def fetch_states(self, wanted: StageStates) -> None:
        """Begins to copy up states that are not on their way."""
        if not self.here:
            self.ring.take(self.turn, self)
            self.coming = set()
        self.fetch(self.ring.link, self._pairs(wanted.up - self.coming))
        self.coming |= wanted.all

    def give_back(self, written: Iterable[str]) -> None:
        """Begins to copy down these states, and gives the buffer back."""
        self.ring.give_back(self.turn, self, [(home, view) for view, home in self._pairs(written)])

    def _pairs(self, names: Iterable[str]) -> list[tuple[Tensor, Tensor]]:
        return [pair for name in sorted(names) for pair in self.states.get(name, ()) if pair[0].numel()]


class StreamedStates:
    """The transfers of the states of the parameters on some routes."""

    #: Kernels read and write the parameters themselves.
    in_place = True

    def __init__(self, routes: Sequence[Route], options: OffloadOptions) -> None:
        self._routes, self._options = routes, options
        self.mirrors = [route.here for route in routes]
        self._rings = {device: DeviceRing(link) for device, link in links_of(routes, options, link_of).items()}
        self.arrays = HomeArrays({device: ring.link for device, ring in self._rings.items()})
        self._refs: Sequence[TensorRef] = ()
        self._place_of: dict[int, int] = {}
        #: The numbers of tensors in the order of a step without transfers.
        self._numbers: dict[int, int] = {}
        self._group_of: dict[int, TransferGroup] = {}
        self._groups: list[TransferGroup] = []
        #: The indices of large tensors that no piece can be updated of.
        self._together: set[int] = set()
        #: The launches that states are brought for, in order; None for those that bring their own.
        self._order: list[_Load | None] = []
        self._index: dict[int, int] = {}
        self._pieces = StatePieces()

    def attach(self, tensor_refs: Sequence[TensorRef]) -> None:
        """Takes the engines' tensors of the parameters."""
        self._refs = tensor_refs
        self._place_of = {id(engine.tensors[i]): place for place, (engine, i) in enumerate(tensor_refs)}
        self._numbers = numbers_of(tensor_refs)

    @property
    def buffers(self) -> list[Tensor]:
        """The transfer buffers, in device memory."""
        return [buffer.memory for ring in self._rings.values() for buffer in ring.buffers]

    # Places

    def _place(self) -> None:
        """Gives every state its place in a buffer, where tensors moved or joined buckets since."""
        engines = [*dict.fromkeys(engine for engine, _ in self._refs)]
        buckets = [(engine, bucket) for engine in engines for bucket in engine.buckets.values()]
        if all(bucket.moved is not None for _, bucket in buckets):
            return
        for engine, bucket in buckets:  # first of all the buffers of before are dropped
            bucket.moved = None
            engine.forget_parts()
        self._pieces = StatePieces()
        self._groups = self._cut_groups()
        self._group_of = {place: group for group in self._groups for place in group.places}
        for ring in self._rings.values():
            ring.fit(pair for group in self._groups if self._ring(group) is ring for pair in self._needed(group))
        views = {
            place: self._view(place, offset)
            for group in self._groups
            for place, offset in zip(group.places, group.offsets, strict=True)
        }
        for engine, bucket in buckets:
            engine.place(bucket, [views[self._place_of[id(tensor)]] for tensor in bucket.tensors])

    def _cut_groups(self) -> list[TransferGroup]:
        """The groups of all tensors with states; those of one are of one bucket."""
        known = self._known()
        sizes = [sum(aligned(bytes_of(state)) for state in self._homes(place).values()) for place in known]
        order = range(len(known))
        groups = transfer_groups(
            reversed(order) if self._options.backward else order, sizes,
            lambda i: id(self._bucket(known[i])), self._options.buffer,
            [largest_states(self._refs[place], self._homes(place)) for place in known],
        )  # fmt: skip
        return [self._of_routes(group, known) for group in groups]

    def _needed(self, group: TransferGroup) -> list[tuple[int, int]]:
        """The turns of a group, each with the bytes of its buffer."""
        if group.whole:
            return [(group.number, group.bytes)]
        return [(group.number + k, self._cut(group).bytes) for k in range(BUFFERS)]

    def _cut(self, group: TransferGroup) -> CutStates:
        """The pieces of the tensor of a group."""
        (place,) = group.places
        formats = self._bucket(place).layout.formats
        return CutStates.of(self._homes(place), self.mirrors[place].numel(), formats, self._options.buffer)

    def _known(self) -> list[int]:
        """The indices of the tensors with states."""
        return [place for place in range(len(self._refs)) if self._bucket(place) is not None]

    def _bucket(self, place: int) -> Any:
        engine, i = self._refs[place]
        return engine.tensors[i].bucket

    def _homes(self, place: int) -> dict[str, Tensor]:
        """The states of a tensor on the host."""
        engine, i = self._refs[place]
        homes: dict[str, Tensor] = self._bucket(place).states[engine.tensors[i].position]
        return homes

    def _of_routes(self, group: TransferGroup, known: Sequence[int]) -> TransferGroup:
        """A group with indices of the routes, in place of those among `known`; whole where no piece can be updated."""
        places = tuple(known[i] for i in group.places)
        bucket = self._bucket(places[0])
        program = next(iter(bucket.versions.values()), bucket).program
        whole = group.whole or places[0] in self._together or not takes_pieces(program)
        return replace(group, places=places, whole=whole)

    def _view(self, place: int, offset: int) -> dict[str, Tensor]:
        """The places of a tensor's states in its buffer; where pieces are brought, tensors that nobody reads or writes.

        Kernels of all tensors of a bucket are bound to these too.
        """
        group, homes = self._group_of[place], self._homes(place)
        memory = self._ring(group).of(group.number).memory
        if group.whole:
            return placed(homes, memory, offset)
        one = {name: memory[: home.element_size()].view(home.dtype)[0] for name, home in homes.items()}
        return {name: one[name].expand(home.shape) for name, home in homes.items()}

    def _ring(self, group: TransferGroup) -> DeviceRing:
        return self._rings[self.mirrors[group.places[0]].device]

    # Launches

    def launches(
        self, places: Sequence[int], grads: Sequence[Tensor], inputs: Mapping[str, Any] | None = None
    ) -> list[Launch]:
        """Makes the launches for the tensors with these indices of the routes. All is checked, and nothing is written.

        States are allocated where a tensor has none yet.
        """
        gradients = dict(zip(places, grads, strict=True))
        self._prepare(gradients)
        return self._ready(lambda engine, groups: [
            launch
            for launches in engine.ready_each(
                [(self._ids(mine), [gradients[i] for i in mine]) for mine in groups], engine.table, inputs
            )
            for launch in launches
        ], gradients)  # fmt: skip

    def parts(
        self, places: Sequence[int], grads: Sequence[Tensor], way: Callable[[RuleData], RuleData | None], counts: bool
    ) -> list[Launch]:
        """The launches for one part of a step of the tensors at these indices: see `Engine.ready_part`."""
        gradients = dict(zip(places, grads, strict=True))
        self._prepare(gradients)
        return self._ready(lambda engine, groups: [
            launch
            for mine in groups
            for launch in engine.ready_part(
                self._ids(mine), [gradients[i] for i in mine], engine.table, way, counts
            )
        ], gradients)  # fmt: skip

    def changes(self, way: Callable[[RuleData], RuleData | None]) -> list[list[Launch]]:
        """The launches of a step of another rule without gradients, for each engine: see `Engine.change`."""
        return self._by_engine(self._ready(
            lambda engine, groups: engine.changes_of(way, engine.table, [*map(self._ids, groups)]), self._known()
        ))  # fmt: skip

    def _by_engine(self, launches: Sequence[Launch]) -> list[list[Launch]]:
        by_engine: dict[int, list[Launch]] = {}
        for launch in launches:
            by_engine.setdefault(id(launch.common), []).append(launch)
        return [*by_engine.values()]

    def _prepare(self, gradients: Mapping[int, Tensor]) -> None:
        """Allocates the states of tensors that have none."""
        for engine in dict.fromkeys(self._refs[place][0] for place in gradients):
            mine = [place for place in gradients if self._refs[place][0] is engine]
            if any(self._bucket(place) is None for place in mine):
                engine.take_table(engine.table)
                engine.prepare(self._ids(mine), [self.arrays.dtype(gradients[i]) for i in mine], engine.table)

    def _ids(self, places: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._refs[place][1] for place in places)

    def _ready(
        self, make: Callable[[TorchEngine, list[list[int]]], list[Launch]], places: Iterable[int]
    ) -> list[Launch]:
        """The launches that `make` makes for the groups of each engine, with their transfers."""
        self._place()
        chosen, launches = {*places}, list[Launch]()
        groups = [[place for place in group.places if place in chosen] for group in self._groups]
        for engine in dict.fromkeys(engine for engine, _ in self._refs):
            mine = [group for group in groups if group and self._refs[group[0]][0] is engine]
            launches += make(engine, mine) if mine else []
        first = [(launch, self._place_of[id(launch.part.tensors[0])]) for launch in launches]
        cut = {place for launch, place in first if not takes_pieces(launch.version.program)}
        whole = {place for place in cut if not self._group_of[place].whole}
        if whole:
            self._together |= whole
            for place in whole:
                self._bucket(place).moved = None
            return self._ready(make, chosen)
        note_shares([launch for launch in launches if launch.version.waits], self._numbers)
        self._order, self._index = [], {}
        for launch in sorted(launches, key=lambda launch: not launch.version.waits):
            self._add(launch)
        return launches

    def _add(self, launch: Launch) -> None:
        """Has a launch ask for its states; that of a large tensor moves their pieces itself."""
        places = [self._place_of[id(tensor)] for tensor in launch.part.tensors]
        group = self._group_of[places[0]]
        ring = self._ring(group)
        if not group.whole:
            self._order.append(None)
            self._pieces.give(launch, ring, group.number, self._cut(group))
            return
        states: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for place, position in zip(places, launch.part.positions or range(len(places)), strict=True):
            for name, home in self._homes(place).items():
                states.setdefault(name, []).append((launch.part.bucket.states[position][name], home))
        self._index[id(launch)] = len(self._order)
        self._order.append(_Load(launch, group.number, ring, states))
        launch.transfers = self

    # Transfers

    def bring(self, launch: Launch, stage: int | None = None, buffers: Sequence[str] = ()) -> None:
        """Has the device wait for the states of a stage, or for those in `buffers`; begins to copy the next launch's.

        The host does not wait.
        """
        load, wanted = self._load(launch), wanted_states(launch, stage, buffers)
        if not wanted.all or (load.here and load.used and wanted.all <= load.coming):
            return
        load.fetch_states(wanted)
        load.hold(load.ring.link)
        place = self._index[id(launch)] + 1
        following = self._order[place] if place < len(self._order) else None
        if following is not None and following.launch.version.waits == launch.version.waits:
            self._fetch(following, stage, buffers)

    def _load(self, launch: Launch) -> _Load:
        load = self._order[self._index[id(launch)]]
        assert load is not None
        return load

    def _fetch(self, load: _Load, stage: int | None, buffers: Sequence[str]) -> None:
        """Begins to copy up the states that the next launch will read, unless its buffer is in use."""
        last = len(load.launch.version.program.stages) - 1
        wanted = wanted_states(load.launch, None if stage is None else min(stage, last), buffers)
        owner = load.ring.of(load.turn).owner
        if wanted.up and (owner is None or not owner.used):
            load.fetch_states(StageStates(wanted.up, wanted.up))

    def take_back(self, launch: Launch, done: bool) -> None:
        """Begins to copy down what a launch has written, and gives its buffer back."""
        load = self._load(launch)
        if load.here:
            load.give_back(load.coming & states_written(launch.version.program) if launch.wrote else ())

    def finish(self, places: Sequence[int]) -> None:
        """Ends a step, whole or not: the host waits until all states are there."""
        for ring in self._rings.values():
            ring.close()
        self._order, self._index = [], {}
