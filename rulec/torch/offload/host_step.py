"""`offload="step"`: states lie on the host, and so does the step; parameters stay where they are.

Tensors travel in transfer groups. The gradients of a group are copied down while the group before it is computed, and
its new weights are copied up while the group after it is. A group's gradients and weights lie in transfer buffers,
each at the same place in every step. So kernels are bound to the same addresses, and steps are as those of parameters
on the CPU: the rules, the launches and their bits are the same.

A weight with a float32 master copy is written and not read. If somebody else has written it, as torch's version
counter tells, the copy takes over what was written before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from rulec.compiler.layout import reads_parameter, stores_parameter
from rulec.compiler.weights import DTYPES, PARTS
from rulec.errors import RulecError
from rulec.language.rule_data import RuleData
from rulec.runtime.buckets.launch import Launch
from rulec.runtime.stages.noise import takes_blocks
from rulec.runtime.stages.step import begin
from rulec.torch.groups.engine import TensorRef
from rulec.torch.groups.options import OffloadOptions
from rulec.torch.groups.routes import Route
from rulec.torch.offload.early import EarlyStages
from rulec.torch.offload.groups import (
    TransferGroup,
    kind_of,
    largest_shard,
    links_of,
    note_shares,
    numbers_of,
    transfer_groups,
)
from rulec.torch.offload.host_arrays import HostArrays, in_order_of, without_memory
from rulec.torch.offload.link import ENDED, Event, Link, link_of
from rulec.torch.offload.pieces import PieceCalls, in_memory_order
from rulec.torch.offload.program_states import arrays_of_stage
from rulec.torch.offload.ring import Ring, Rings, aligned, bytes_of, view_in
from rulec.torch.tensors.dtensor import local_tensor
from rulec.torch.tensors.fake import is_fake, plain_memory
from rulec.torch.tensors.tensors import check_conforms, dtype_name, is_dense

_MASTER = PARTS["master"].name

#: The elements of a weight that are compared with its master copy at a time.
_COMPARED = 1 << 20


@dataclass
class _Load:
    """What a launch reads and writes: pairs of a tensor in a transfer buffer and one on the device.

    `gradients` is empty where they are in host memory already. If it `reads`, it reads the weights too; `writes` is
    the stage that writes them, None once they are on their way up. `arrived` is the copy down; `here` is True while the
    launch has it, and `done` once it has ended.
    """

    launch: Launch
    turn: int
    rings: Rings
    gradients: list[tuple[Tensor, Tensor]]
    weights: list[tuple[Tensor, Tensor]]
    reads: bool
    writes: int | None
    arrived: Event | None = None
    here: bool = False
    done: bool = False


class HostStep:
    """The steps of the parameters on some routes on the host.

    `mirrors` are the tensors that kernels read and write in place of the parameters, by index of the routes.
    """

    #: Kernels read and write tensors in place of the parameters.
    in_place = False

    def __init__(self, routes: Sequence[Route], options: OffloadOptions, weights: str) -> None:
        self._routes, self._options = routes, options
        self.arrays = HostArrays()
        self.mirrors = [without_memory(route.here) for route in routes]
        self.arrays.routes = {id(mirror): route for mirror, route in zip(self.mirrors, routes, strict=True)}
        written = [weights == "master" and dtype_name(route.here.dtype) in DTYPES["master"] for route in routes]
        self._rings = {
            device: Rings(link, Ring(2), Ring(2 if all(written) else 3))
            for device, link in links_of(routes, options, link_of).items()
        }
        self._groups: list[TransferGroup] = []
        self._refs: Sequence[TensorRef] = ()
        self._place_of: dict[int, int] = {}
        self._views: dict[Any, list[Tensor]] = {}
        #: The launches of a step in their order; None for one that moves its pieces itself.
        self._order: list[_Load | None] = []
        self._index: dict[int, int] = {}
        self._pieces = PieceCalls()
        #: The version of each parameter after its last update here, by index of the routes.
        self._versions: dict[int, int] = {}
        self._uploads: dict[Link, Event] = {}
        #: The stages that have run before their step.
        self.early = EarlyStages(routes)

    # Memory

    def attach(self, tensor_refs: Sequence[TensorRef]) -> None:
        """Takes the engines' tensors of the mirrors, and gives each mirror its place in a transfer buffer."""
        self._refs = tensor_refs
        self.early.attach(tensor_refs)
        self._place_of = {id(engine.tensors[i]): place for place, (engine, i) in enumerate(tensor_refs)}
        numbers = {id(engine): number for number, (engine, _) in enumerate(tensor_refs)}
        for place, (engine, i) in enumerate(tensor_refs):
            if engine.needs_copy(i, engine.table):
                self.mirrors[place] = without_memory(self.mirrors[place], contiguous=True)
        order, sizes = range(len(self._routes)), [*map(bytes_of, self.mirrors)]
        shards = [*map(largest_shard, tensor_refs)]
        bounds = [
            size if shard is None else shard * mirror.element_size()
            for size, shard, mirror in zip(sizes, shards, self.mirrors, strict=True)
        ]
        groups = transfer_groups(
            reversed(order) if self._options.backward else order, sizes,
            lambda place: kind_of(self._routes[place], numbers[id(tensor_refs[place][0])]), self._options.buffer,
            bounds,
        )  # fmt: skip
        dense = [is_dense(route.here) for route in self._routes]
        self._place_mirrors([replace(each, whole=each.whole or not dense[each.places[0]]) for each in groups])

    def _place_mirrors(self, groups: list[TransferGroup]) -> None:
        """Gives each mirror its place in a buffer of weights; one that is moved in pieces has no memory.

        TensorError where buffers have no memory; then all is as before.
        """
        for group in groups:
            count = group.bytes if group.whole else self._options.buffer
            self._rings_of(group).weights.grow(self._rings_of(group).link, count)
        self._groups = groups
        for group in (group for group in self._groups if group.whole):
            memory = self._rings_of(group).weights.of(group.number).memory
            for place, offset in zip(group.places, group.offsets, strict=True):
                self.mirrors[place] = view_in(memory, offset, self.mirrors[place])
        self.arrays.routes = {id(mirror): route for mirror, route in zip(self.mirrors, self._routes, strict=True)}
        for mirror, (engine, i) in zip(self.mirrors, self._refs, strict=True):
            engine.replace(i, mirror)

    def _rings_of(self, group: TransferGroup) -> Rings:
        return self._rings[self._routes[group.places[0]].here.device]

    @property
    def buffers(self) -> list[Tensor]:
        """The transfer buffers, in host memory."""
        return [buffer.memory for rings in self._rings.values() for buffer in rings.buffers]

    # Launches

    def launches(
        self, places: Sequence[int], grads: Sequence[Tensor], inputs: Mapping[str, Any] | None = None,
        arrived: bool = False,
    ) -> list[Launch]:  # fmt: skip
        """Makes the launches for the tensors with these indices of the routes, and gradients on their devices.

        Everything is checked, and nothing is written. Gradients that have `arrived` are in host memory, and stay there.
        """
        check_not_captured()
        self._order, self._index = [], {}
        gradients = dict(zip(places, grads, strict=True))
        for place, grad in gradients.items():
            check_conforms(grad, self.mirrors[place], self._routes[place].name)
        chosen = [(group, [i for i in group.places if i in gradients]) for group in self._groups]
        chosen = [(group, mine) for group, mine in chosen if mine]
        begun = self.early.take(chosen, gradients)
        rest = [(group, mine) for group, mine in chosen if group.number not in begun]
        ready = begun | self._ready(rest, gradients, inputs, arrived)
        large = {g for g, _ in rest if not g.whole and not all(takes_blocks(x.version) for x in ready[g.number])}
        if large:
            self._place_mirrors([replace(group, whole=True) if group in large else group for group in self._groups])
            return self.launches(places, grads, inputs, arrived)
        for place in places:
            self._take_over(place)
        launches = [(group, launch) for group, _ in chosen for launch in ready[group.number]]
        return self._added(launches, gradients, arrived)

    def begin(self, gradients: Mapping[int, Tensor], comes: Callable[[int], bool]) -> None:
        """Runs the stages of transfer groups that need no value of other groups: see `rulec.torch.offload.early`.

        `gradients` are in host memory, by index of the routes; `comes` says of an index whether one is still to come.
        """
        for group in self._groups:
            mine = {place: gradients[place] for place in group.places if place in gradients}
            if not mine or any(comes(place) for place in group.places if place not in mine):
                continue
            for place, grad in mine.items():
                check_conforms(grad, self.mirrors[place], self._routes[place].name)
            expected = (place for place in range(len(self._routes)) if place in gradients or comes(place))
            launches = self.early.make(group, mine, expected)
            self._order, self._index = [], {}
            self._added([(group, launch) for launch in launches], mine, arrived=True)
            for launch in launches:
                begin(launch)

    def parts(
        self, places: Sequence[int], grads: Sequence[Tensor], way: Callable[[RuleData], RuleData | None], counts: bool
    ) -> list[Launch]:
        """RulecError: no part of a step moves its weights."""
        raise RulecError("offload='step' takes whole steps: give offload='states' with accumulate='fold'")

    def _ready(
        self, chosen: Sequence[tuple[TransferGroup, list[int]]], gradients: Mapping[int, Tensor],
        inputs: Mapping[str, Any] | None, arrived: bool,
    ) -> dict[int, list[Launch]]:  # fmt: skip
        """The launches of each group by its number, with gradients that lie in its transfer buffer, or have arrived."""
        for rings in self._rings.values() if arrived and all(group.whole for group in self._groups) else ():
            if rings.gradients.buffers:  # of a step without a backward pass, such as the first
                rings.gradients.drop()
                self._views.clear()
        for group, mine in () if arrived else chosen:
            count = sum(aligned(bytes_of(gradients[i])) for i in mine) if group.whole else self._options.buffer
            if self._rings_of(group).gradients.grow(self._rings_of(group).link, count):
                self._views.clear()
        ready: dict[int, list[Launch]] = {}
        for engine in dict.fromkeys(self._refs[mine[0]][0] for _, mine in chosen):
            of_engine = [(group, mine) for group, mine in chosen if self._refs[mine[0]][0] is engine]
            sets = [
                (
                    tuple(self._refs[i][1] for i in mine),
                    [gradients[i] for i in mine] if arrived else self._gradients(group, mine, gradients),
                )
                for group, mine in of_engine
            ]
            each = engine.ready_each(sets, engine.table, inputs, self.early.alike(engine))
            ready |= {group.number: launches for (group, _), launches in zip(of_engine, each, strict=True)}
        return ready

    def _gradients(self, group: TransferGroup, places: Sequence[int], gradients: Mapping[int, Tensor]) -> list[Tensor]:
        """Tensors for the gradients of a group in its buffer; the gradient itself, where that moves in pieces."""
        if not group.whole:
            return [in_order_of(gradients[i], self.mirrors[i]) for i in places]
        dtypes = tuple(gradients[i].dtype for i in places)
        key = group, tuple(places), dtypes
        if key not in self._views:
            memory, offset, views = self._rings_of(group).gradients.of(group.number).memory, 0, []
            for place, dtype in zip(places, dtypes, strict=True):
                views.append(view_in(memory, offset, self.mirrors[place], dtype))
                offset += aligned(bytes_of(views[-1]))
            self._views[key] = views
        return self._views[key]

    def changes(self, way: Callable[[RuleData], RuleData | None]) -> list[list[Launch]]:
        """The launches of a step of another rule without gradients, for each engine: see `Engine.change`."""
        check_not_captured()
        self._order, self._index = [], {}
        changes = []
        for engine in dict.fromkeys(engine for engine, _ in self._refs):
            groups = [group for group in self._groups if self._refs[group.places[0]][0] is engine]
            ids = [[self._refs[place][1] for place in group.places] for group in groups]
            sets = [tuple(i for i in mine if engine.tensors[i].bucket is not None) for mine in ids]
            launches = engine.changes_of(way, engine.table, sets)
            group_of = {id(engine.tensors[i]): group for group, mine in zip(groups, ids, strict=True) for i in mine}
            changes.append(self._added([(group_of[id(x.part.tensors[0])], x) for x in launches], {}))
        for place in range(len(self._routes)):
            self._take_over(place)
        return changes

    def _added(
        self, launches: Sequence[tuple[TransferGroup, Launch]], gradients: Mapping[int, Tensor], arrived: bool = False
    ) -> list[Launch]:
        """The launches of transfer groups, each with what it moves. Reductions are those of whole buckets."""
        for group, launch in launches:
            self._add(launch, group, gradients, arrived)
        each = [launch for _, launch in launches]
        note_shares([launch for launch in each if launch.version.waits], numbers_of(self._refs))
        return each

    def _add(
        self, launch: Launch, group: TransferGroup, gradients: Mapping[int, Tensor], arrived: bool
    ) -> None:  # fmt: skip
        """Adds what a launch reads and writes; a launch of a large tensor moves its pieces itself.

        Without gradients it reads none.
        """
        places = [self._place_of[id(tensor)] for tensor in launch.part.tensors]
        rings, program = self._rings_of(group), launch.version.program
        if not group.whole:
            grad = launch.grads[0] if gradients else None
            self._pieces.give(launch, rings, self._options.buffer, self._routes[places[0]].here, grad, arrived)
            self._order.append(None)
            return
        weights = [(self.mirrors[i], self._routes[i].here) for i in places]
        pairs = zip(launch.grads, places, strict=True)
        moved = [(view, gradients[i]) for view, i in pairs if i in gradients and not arrived]
        # Of tensors that skip the step, the old weights are copied up.
        reads = reads_parameter(program) or program.skip is not None
        self._index[id(launch)] = len(self._order)
        load = _Load(launch, group.number, rings, moved, weights, reads, stores_parameter(program))
        load.arrived = ENDED if arrived else None
        self._order.append(load)
        launch.transfers = self

    def _take_over(self, place: int) -> None:
        """Has a master copy take over what somebody else wrote into its parameter."""
        engine, tensor_id = self._refs[place]
        master = engine.state(tensor_id).get(_MASTER)
        if master is None or is_fake(master) or self._versions.get(place) == _version(self._routes[place]):
            return
        with plain_memory():
            device = self._routes[place].here
            values = torch.empty_like(self.mirrors[place]).copy_(device)
            parts = [torch.split(in_memory_order(x), _COMPARED) for x in (values, master)]
            for weights, copies in zip(*parts, strict=True):
                weights = weights.float()
                near = (weights - copies).abs() <= copies.abs() * 2.0**-7 + 2.0**-24
                copies.copy_(torch.where(near, copies, weights))

    # Transfers

    def bring(self, launch: Launch, stage: int | None = None, buffers: Sequence[str] = ()) -> None:
        """Has the gradients of a launch, and the weights that it reads, in their buffers; begins to copy the next."""
        place = self._index[id(launch)]
        load = self._order[place]
        assert load is not None
        program, moved = launch.version.program, {"g", "p"} if load.gradients else {"p"}
        wanted = arrays_of_stage(program, stage) if stage is not None else {*buffers}
        if load.here or moved.isdisjoint(wanted):
            return
        self._start(load)
        assert load.arrived is not None
        load.arrived.wait()
        if not load.reads:
            load.rings.weights.claim(load.turn, load)
        load.here = True
        following = self._order[place + 1] if place + 1 < len(self._order) else None
        if following is not None and not following.done and _are_apart(load, following):
            self._start(following)

    def _start(self, load: _Load) -> None:
        """Begins to copy the tensors of a launch down, unless its buffers have them, or will."""
        moves = (load.rings.gradients, load.gradients), (load.rings.weights, load.weights if load.reads else [])
        rings = [ring for ring, pairs in moves if pairs]
        if load.arrived is not None and all(ring.is_of(load.turn, load) for ring in rings):
            return
        for ring in rings:
            ring.claim(load.turn, load)
        # Without gradients too: the device must have read the old weights before new ones are copied up.
        load.arrived = load.rings.link.down([pair for _, pairs in moves for pair in pairs])
        for ring in rings:
            ring.fill(load.turn, load.arrived)

    def take_back(self, launch: Launch, done: bool) -> None:
        """Copies the new weights of a launch up, once they are written, and gives its buffers back."""
        load = self._order[self._index[id(launch)]]
        assert load is not None
        load.done = done
        if not load.here:
            return
        load.here, load.arrived, event = False, None, None
        if load.writes is not None and launch.ran >= load.writes:
            load.writes = None
            event = load.rings.last = load.rings.link.up([(device, mirror) for mirror, device in load.weights])
        if load.gradients:
            load.rings.gradients.release(load.turn)
        load.rings.weights.release(load.turn, event)

    def finish(self, places: Sequence[int]) -> None:
        """Ends a step of the tensors at these indices, whole or not: their devices wait for the last copies up."""
        self._order, self._index = [], {}
        self.early.forget()
        self._pieces.release()
        self._versions |= {place: _version(self._routes[place]) for place in places}
        for rings in self._rings.values():
            if rings.last is not None:
                self._uploads[rings.link] = rings.last
            rings.hold()
        for rings in self._rings.values():
            rings.free()

    def uploads(self) -> dict[Link, Event]:
        """The last copy up over each link since the last call: other streams of the device may wait for it."""
        uploads, self._uploads = self._uploads, {}
        return uploads

    def announce(self, places: Sequence[int], param: Tensor) -> None:
        """Increases the version of a parameter on these routes, before its update here.

        Whoever saved it for the backward pass finds out, and no master copy takes it for a write of somebody else.
        """
        mine = [place for place in places if self._versions.get(place) == _version(self._routes[place])]
        increment_version(param)
        self._versions |= {place: _version(self._routes[place]) for place in mine}


def _are_apart(load: _Load, other: _Load) -> bool:
    """Whether a launch may be copied down while another is computed: its buffers are others."""
    return load.rings is not other.rings or load.rings.apart(load.turn, other.turn)


def check_not_captured() -> None:
    """RulecError where a CUDA graph is being captured: no graph has the work of the host."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RulecError("a step with offload works on the host, and cannot be captured in a CUDA graph: leave one out")


def _version(route: Route) -> int:
    return local_tensor(route.param)._version
