"""The processes of DTensors: reductions over the dimensions of a mesh, and steps that all processes agree on."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.arrays.piece import Piece
from rulec.errors import HyperError, RulecError
from rulec.language.node import Op
from rulec.language.rule import Rule
from rulec.runtime.device import Scaling
from rulec.runtime.exchange import Spread
from rulec.runtime.failure import Failure
from rulec.runtime.launch import Launch
from rulec.runtime.owners import Division, Schedule
from rulec.runtime.partial import Whole
from rulec.runtime.peers import Peers
from rulec.runtime.sharing import Assignment, Work
from rulec.torch.across import Across
from rulec.torch.communication import Traffic
from rulec.torch.fake import is_fake
from rulec.torch.placed import (
    flat_start,
    has_matrices,
    indices_here,
    is_flat,
    is_placed,
    is_split,
    place_of,
    rectangles_of,
    sees_more,
)  # fmt: skip
from rulec.torch.sections import Section
from rulec.torch.tensors import DTYPES

_OPS = {Op.SUM: "SUM", Op.MIN: "MIN", Op.MAX: "MAX"}


@dataclass(frozen=True, eq=False)
class SentBytes:
    """An exchange of bytes that has begun; `message` is the vector sent, and lives until all is sent."""

    work: Any
    message: Tensor
    result: Tensor
    like: Any

    def wait(self) -> None:
        """Waits until it is over."""
        if self.work is not None:
            self.work.wait()

    def received(self) -> Any:
        """The vectors of all processes, one after the other, of the kind and dtype of `like`."""
        if not isinstance(self.like, Tensor):
            return self.result.to("cpu", torch.from_numpy(self.like[:0].copy()).dtype).numpy()
        return self.result.to(self.like.device, self.like.dtype)


@dataclass(frozen=True)
class MeshPeers:
    """The processes along dimensions of a mesh: a process group that this process belongs to.

    `name` has the names of the dimensions.
    """

    group: Any
    name: str = field(default="", compare=False)

    def reduce(self, op: Op, numbers: Any) -> Any:
        """A vector in float64 reduced over the processes: a tensor on its device, or an array of NumPy's."""
        if is_fake(numbers):
            return numbers
        sent = numbers.clone() if isinstance(numbers, Tensor) else torch.from_numpy(np.array(numbers, np.float64))
        here = sent.to(self._device)
        torch.distributed.all_reduce(here, getattr(torch.distributed.ReduceOp, _OPS[op]), group=self.group)
        return here.to(sent.device) if isinstance(numbers, Tensor) else here.cpu().numpy()

    @property
    def label(self) -> str:
        """The name with the number of processes, as `dp x tp (8)`."""
        return f"{self.name} ({self.size})"

    @property
    def rank(self) -> int:
        """The place of this process in the group."""
        return torch.distributed.get_rank(self.group)

    @property
    def size(self) -> int:
        """The number of processes."""
        return torch.distributed.get_world_size(self.group)

    def exchange(self, sent: Any, counts: Sequence[int], received: Sequence[int], dtype: str) -> SentBytes:
        """Begins to send each process its share of a vector, `counts` long; `received` are the lengths of what comes.

        Elements travel in `dtype`, and come in that of `sent`.
        """
        if is_fake(sent):
            return SentBytes(None, sent, sent.new_zeros(sum(received)), sent)
        tensor = sent if isinstance(sent, Tensor) else torch.from_numpy(np.ascontiguousarray(sent))
        # An empty array of NumPy's has no stride, and torch sees no bytes in it.
        message = (tensor if len(tensor) else tensor.new_empty(0)).to(self._device, DTYPES[dtype])
        result, size = message.new_empty(sum(received)), message.element_size()
        # Bytes, for not every transport knows every dtype.
        work = torch.distributed.all_to_all_single(
            result.view(torch.uint8), message.view(torch.uint8), [size * n for n in received],
            [size * n for n in counts], group=self.group, async_op=True,
        )  # fmt: skip
        return SentBytes(work, message, result, sent[:0])

    @property
    def _device(self) -> torch.device:
        nccl = torch.distributed.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def whole_of(param: Any, spread: bool, section: Section | None = None) -> Whole | None:
    """The whole of a DTensor, a section of it or a flat parameter; None where this process has all of it.

    With `spread` it says where the other parts are.
    """
    if is_flat(param):
        start, length = flat_start(param), param.numel()
        return None if start is None else Whole((length,), (), Piece(start), (range(start, start + length),))
    if not is_split(param):
        return None
    mesh = param.device_mesh
    axes = [i for i, placed in enumerate(param.placements) if not placed.is_replicate() and mesh.size(i) > 1]
    cuts = tuple((param.placements[axis].dim, MeshPeers(mesh.get_group(axis), _name(mesh, [axis]))) for axis in axes)
    lies = _spread(param, section) if spread and axes else None
    shape = tuple(param.shape) if section is None else section.shape(param.shape)
    return Whole(shape, cuts, place_of(param, section) or Piece(), indices_here(param, section), lies)


def _spread(param: Any, section: Section | None) -> Spread | None:
    """The place of every part and replica of a DTensor, or of a section of it; None where one is no rectangle."""
    mesh = param.device_mesh
    every = _long_axes(mesh)
    cut = tuple(axis for axis in every if not param.placements[axis].is_replicate())
    alone = _spread_along(param, section, cut, None) if cut != every else None
    return _spread_along(param, section, every, alone)


def _spread_along(
    param: Any, section: Section | None, axes: tuple[int, ...], alone: Spread | None
) -> Spread | None:  # fmt: skip
    """The same among this process and its neighbours along these dimensions of the mesh."""
    mesh, peers = param.device_mesh, _peers_along(param.device_mesh, axes)
    ranks = torch.distributed.get_process_group_ranks(peers.group)
    rectangles = rectangles_of(param, ranks, section)
    if rectangles is None:
        return None
    cut = [axis for axis, placed in enumerate(param.placements) if not placed.is_replicate()]
    places = [(mesh.mesh == rank).nonzero()[0].tolist() for rank in ranks]
    coordinates = tuple(tuple((at[axis], mesh.size(axis)) for axis in cut) for at in places)
    return Spread(peers, Division(rectangles), coordinates, alone)


def _long_axes(mesh: Any) -> tuple[int, ...]:
    """The dimensions of a mesh with several processes."""
    return tuple(axis for axis in range(mesh.ndim) if mesh.size(axis) > 1)


def _all_peers(mesh: Any) -> MeshPeers:
    """All processes of a mesh."""
    return _peers_along(mesh, _long_axes(mesh))


def _peers_along(mesh: Any, axes: tuple[int, ...]) -> MeshPeers:
    """This process and its neighbours along these dimensions of a mesh."""
    one = mesh.get_group(axes[0]) if len(axes) == 1 else _joint_group(torch.distributed.group.WORLD, mesh, axes)
    return MeshPeers(one, _name(mesh, axes))


def _name(mesh: Any, axes: Sequence[int]) -> str:
    """The names of dimensions of a mesh, as `dp x tp`."""
    names = mesh.mesh_dim_names or [f"dimension {axis}" for axis in range(mesh.ndim)]
    return " x ".join(names[axis] for axis in axes)


@functools.cache
def _joint_group(world: Any, mesh: Any, axes: tuple[int, ...]) -> Any:
    """The group of this process and its neighbours along these dimensions of a mesh.

    A flattened mesh is another way to it; torch 2.13 then gathers DTensors by it, and loses rows of uneven parts.
    """
    coordinate = mesh.get_coordinate()
    along = tuple(slice(None) if axis in axes else coordinate[axis] for axis in range(mesh.ndim))
    return torch.distributed.new_group(mesh.mesh[along].flatten().tolist(), use_local_synchronization=True)


#: More than there are processes, and the bytes of an error that are told to others.
_PROCESSES, _TEXT = 1 << 24, 400

#: One message: an operation, the processes it is over, and how many numbers it has.
Message = tuple[Op, Peers, int]


class Agreement:
    """The agreement of processes on every step in which parts of tensors are reduced together.

    The first message of a step to each set of processes ends with three words: how many processes refuse the step, how
    many take another step than the one before, and how many there are. Where one refuses, or not all take the other
    step, all raise RulecError, and nothing is written. Another step is compared before it begins. Where matrices are
    exchanged, a message of the words alone comes before, and after each exchange one that says who has failed in it.
    """

    def __init__(self, peers: Sequence[Peers]) -> None:
        self.peers = [*dict.fromkeys(peers)]
        #: The messages of the first round of the step before.
        self._expected: list[Message] = []
        self._digest: int | None = None
        self._crc = 0
        self._step: tuple[Any, ...] = ()
        self._words = np.zeros(3)
        #: Whether the step is agreed on in a message of the words alone, and not in its first round.
        self._apart = False
        self._open = self._agreed = False
        self._sent: list[Message] = []
        self.traffic = Traffic()

    def __reduce__(self) -> Any:
        raise RulecError("an optimizer of DTensors belongs to its processes: copy its state_dict() instead")

    # A step

    def open(self) -> None:
        """Opens a step: until its first round is over this process may refuse it."""
        self._open, self._agreed, self._sent = True, False, []
        self._words = np.array([0.0, 0.0, 1.0])
        self.traffic.begin()

    def begin(self, plan: Any, launches: Sequence[Launch], scaling: Scaling | None) -> None:
        """Begins the opened step with these launches; RulecError where another process takes another step.

        It is another step where the scaled gradients of one process have an infinity, and those of another none.
        """
        digest = self._digest_of(plan, launches, scaling is not None and bool(scaling.found_inf))
        self._apart = any(launch.version.exchanges for launch in launches)
        if digest != self._digest:
            if self._digest is not None:
                self._words[1] = 1.0
                self._replay()
                self._check()
            self._compare(digest)
            self._expected = [(Op.SUM, peers, 0) for peers in self.peers]
            self._digest, self._agreed = digest, not self._apart
        elif not self._apart and not any(count for _, _, count in self._expected):
            self._replay()
            self._check()
            self._agreed = True

    def refuse(self) -> None:
        """Tells the other processes, where they wait, that this one takes no step."""
        if not self._open:
            return
        self._open = False
        self._words[0] = 1.0
        if self._digest is None:
            self._compared(0.0, refuses=True)
        else:
            self._replay()

    # Rounds of reductions

    def reduce(self, op: Op, peers: Peers, numbers: Any) -> Any:
        """A vector in float64 reduced over some processes."""
        self._meet()
        if not self._open:
            return self._send(op, peers, numbers)
        self._sent.append((op, peers, len(numbers)))
        if op is not Op.SUM or self._agreed:
            return self._send(op, peers, numbers)
        return self._with_words(peers, numbers)

    def close(self) -> None:
        """Ends a round. At the end of the first, RulecError where the processes do not agree."""
        if not self._open:
            self.traffic.end_round()
            return
        told = {peers for op, peers, _ in self._sent if op is Op.SUM}
        for peers in (peers for peers in self.peers if peers not in told):
            if self._agreed:
                self._sent.append((Op.SUM, peers, 0))
            else:
                self.reduce(Op.SUM, peers, np.zeros(0))
        self._open = False
        self.traffic.end_round()
        self._expected = self._sent
        if not self._agreed:
            self._check()

    def assigned(self, peers: Peers, works: Sequence[Work], chosen: Assignment) -> None:
        """Takes note of the owners of tensors, and of their work."""
        self.traffic.assigned(peers, works, chosen)

    def exchanged(self, peers: Peers, schedule: Schedule) -> None:
        """Takes note of matrices that are exchanged. RulecError where the processes do not agree on the step."""
        self._meet()
        self.traffic.exchanged(peers, schedule)

    def conclude(self, failure: Failure) -> None:
        """Ends exchanges. RulecError, in all processes, where one has failed in them."""
        failed, nobody = failure.error is not None, np.inf
        mine = failure.at * _PROCESSES + torch.distributed.get_rank() if failed else nobody
        first = self._of_all(Op.MIN, np.array([mine]))[0]
        if first == nobody:
            return
        text = str(failure).encode()[:_TEXT] if mine == first else b""
        said = self._of_all(Op.MAX, np.array([*text.ljust(_TEXT, b"\0")], np.float64))
        words = bytes(map(int, said)).rstrip(b"\0").decode(errors="ignore")
        raise RulecError(
            f"process {int(first) % _PROCESSES} failed in work that all processes wait for, so none goes on with this "
            f"step: {words}; once the cause is gone, take the step again"
        ) from failure.error

    def _meet(self) -> None:
        """Agrees on a step with exchanges, once. A process with an error before it has refused the step."""
        if self._open and self._apart:
            self._replay()
            self._check()
            self._open = False

    def _send(self, op: Op, peers: Any, numbers: Any) -> Any:
        self.traffic.reduced(peers, len(numbers))
        return peers.reduce(op, numbers)

    def _with_words(self, peers: Peers, numbers: Any) -> Any:
        there = isinstance(numbers, Tensor)
        words: Any = torch.from_numpy(self._words).to(numbers.device) if there else self._words
        result = self._send(Op.SUM, peers, torch.cat([numbers, words]) if there else np.concatenate([numbers, words]))
        self._words = result[-3:].cpu().numpy() if there else result[-3:]
        return result[:-3]

    def _replay(self) -> None:
        """Sends the messages of the step before once more, without numbers: other processes may wait for them."""
        for op, peers, count in self._expected:
            if op is Op.SUM:
                self._with_words(peers, np.zeros(count))
            else:
                self._send(op, peers, np.zeros(count))
        self.traffic.end_round()

    # Agreement

    def _check(self) -> None:
        """RulecError unless all processes take a step, and all or none of them another one than before."""
        refused, changed, there = self._words
        if refused:
            self._open = False
            raise RulecError("another process takes no step, for an error of its own: see there; nothing was changed")
        if changed not in (0.0, there):
            self._open = False
            raise _other_step()
        self._words = np.array([0.0, 0.0, 1.0])

    def _compare(self, digest: int) -> None:
        """RulecError unless all processes begin the step of this digest."""
        least, most, refused = self._compared(float(digest), refuses=False)
        if refused:
            self._open = False
            raise RulecError("another process takes no step, for an error of its own: see there; nothing was changed")
        if least != most:
            self._open = False
            raise _other_step()

    def _compared(self, digest: float, refuses: bool) -> tuple[float, float, float]:
        """The least and largest digest of all processes, and whether any refuses."""
        words = self._of_all(Op.MAX, np.array([-np.inf, -np.inf, 1.0] if refuses else [-digest, digest, 0.0]))
        return -float(words[0]), float(words[1]), float(words[2])

    def _of_all(self, op: Op, numbers: Any) -> Any:
        """Numbers reduced over all processes, in a message of their own."""
        for peers in self.peers:
            numbers = self._send(op, peers, numbers)
        self.traffic.end_round()
        return numbers

    def _digest_of(self, plan: Any, launches: Sequence[Launch], overflowed: bool) -> int:
        """A number for a step: of the updated parameters, of the programs that update them, and of an overflow."""
        step = (plan, overflowed, *(x for launch in launches for x in (launch.version, launch.part)))
        if len(step) != len(self._step) or any(a is not b for a, b in zip(step, self._step, strict=True)):
            programs = [(launch.version.program, launch.part.positions) for launch in launches]
            told = [(p.name, [r.name for s in p.stages for r in s.reduces], at) for p, at in programs]
            self._crc = zlib.crc32(repr((plan.chosen, told, overflowed)).encode())
            self._step = step
        return self._crc


def meeting_of(
    routed: Sequence[tuple[Any, Rule]], before: Agreement | None, across: Across | None
) -> Agreement | None:  # fmt: skip
    """The meeting for parameters with these rules: the one before, with all processes; None where none need to meet.

    HyperError where `across`, which takes the values of groups and the model over processes with other tensors, has
    processes with the same ones.
    """
    if across is not None:
        for mesh in {param.device_mesh for param, _ in routed if is_placed(param)}:
            _check_apart(mesh, across)
    peers = [peers for param, rule in routed if sees_more(rule) for peers in _meeting_peers(param, rule)]
    if before is None:
        return Agreement(_outermost(peers)) if peers else None
    before.peers = _outermost([*before.peers, *peers])
    return before


def _outermost(peers: Sequence[Any]) -> list[Any]:
    """The sets of processes, without those that others contain: who agrees with all agrees with some."""
    ranks = {each: frozenset(torch.distributed.get_process_group_ranks(each.group)) for each in peers}
    return [each for each in ranks if not any(ranks[each] < other for other in ranks.values())]


def _check_apart(mesh: Any, across: Across) -> None:
    """HyperError where processes of a mesh are among those with other tensors."""
    both = {*across.ranks} & {*mesh.mesh.flatten().tolist()} - {torch.distributed.get_rank()}
    if both:
        raise HyperError(
            f"process {min(both)} of reduce_over has the same DTensors, whose values would be counted again: give a "
            f"group with one process of each stage of the pipeline, as mesh['pp'].get_group(), or leave it out"
        )


def _meeting_peers(param: Any, rule: Rule) -> list[Peers]:
    """The processes that a parameter's step is agreed on with, in as many sets as there are dimensions of its mesh.

    They are all of the mesh. Replicas send one another nothing but their agreement; else one would step without others.
    """
    whole = whole_of(param, spread=False)
    if whole is None or not whole.cuts:
        return []
    mesh = param.device_mesh
    if has_matrices(rule):
        return [_all_peers(mesh)]
    replicated = [axis for axis in _long_axes(mesh) if param.placements[axis].is_replicate()]
    return [*(peers for _, peers in whole.cuts), *(_peers_along(mesh, (axis,)) for axis in replicated)]


def _other_step() -> RulecError:
    return RulecError(
        "the processes have gradients of other tensors, or other rules, or infinities in the scaled gradients of some: "
        "give every process the gradients of the same tensors, and reduce GradScaler's findings; nothing was changed"
    )
