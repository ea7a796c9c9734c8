"""The states of a large tensor that are brought piece by piece, where its rule looks at one element at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rulec.backend.protocol import Rows, Scratch, Written
from rulec.formats import Format
from rulec.runtime.buckets.bucket import Bucket, Version
from rulec.runtime.buckets.launch import Launch
from rulec.runtime.stages.noise import OtherCalls
from rulec.torch.offload.device_ring import BufferOwner, DeviceRing
from rulec.torch.offload.link import Pairs
from rulec.torch.offload.pieces import ended_after, in_memory_order, piece_of, piece_spans, rows_of_pieces
from rulec.torch.offload.program_states import states_of_stage, states_written
from rulec.torch.offload.ring import aligned, bytes_of, view_in


@dataclass(frozen=True)
class CutStates:
    """The pieces of a tensor: the elements of each, and its states on the host."""

    spans: list[slice]
    homes: list[dict[str, Tensor]]

    @classmethod
    def of(cls, homes: Mapping[str, Tensor], count: int, formats: Sequence[tuple[str, Format]], most: int) -> CutStates:
        """The pieces of a tensor of `count` elements, of about `most` bytes of states each."""
        spans = piece_spans(count, most * count // sum(map(bytes_of, homes.values())), formats)
        return cls(spans, [piece_of(homes, span, formats) for span in spans])

    @property
    def bytes(self) -> int:
        """The bytes of a buffer for the longest."""
        return sum(aligned(bytes_of(home)) for home in self.homes[0].values())


def placed(homes: Mapping[str, Tensor], memory: Tensor, offset: int = 0) -> dict[str, Tensor]:
    """Tensors like the states in `homes`, one after the other in the memory of a buffer."""
    views = {}
    for name, home in homes.items():
        views[name] = view_in(memory, offset, home)
        offset += aligned(bytes_of(home))
    return views


class StatePieces:
    """The calls of kernels for tensors whose states are larger than a transfer buffer, bound to pieces of each."""

    def __init__(self) -> None:
        self._calls = OtherCalls()

    def give(self, launch: Launch, ring: DeviceRing, turn: int, pieces: CutStates) -> None:
        """Has a launch of one tensor bring its states itself; the first piece has the buffer of `turn` in the ring."""
        position = launch.part.positions[0] if launch.part.positions else 0
        version, bucket = launch.version, launch.part.bucket
        self._calls.give(
            launch, f"pieces of the states of {position}",
            lambda: StatePieceCall(version, bucket, position, ring, turn, pieces),
        )  # fmt: skip


class StatePieceCall:
    """A kernel bound to the pieces of one tensor as if each were a tensor; see `takes_pieces`.

    Stages without states have the whole tensor.
    """

    def __init__(
        self, version: Version, bucket: Bucket, position: int, ring: DeviceRing, turn: int, pieces: CutStates
    ) -> None:
        self._bucket, self._position, self._ring, self._turn, self._pieces = bucket, position, ring, turn, pieces
        self._states = [placed(homes, ring.of(turn + k).memory) for k, homes in enumerate(pieces.homes)]
        self._program, self._whole = version.program, version.call
        param = in_memory_order(bucket.params[position])
        self._call = version.kernel.bind([param[span] for span in pieces.spans], self._states)

    def __call__(
        self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Runs a stage, piece by piece: the next is on its way while one is computed."""
        states = states_of_stage(self._program, stage)
        if not states.all:
            assert self._whole is not None
            return self._whole(stage, moving, rows, scratch, tensors=tensors, stream=stream)
        written = states.all & states_written(self._program)
        gradient, spans = in_memory_order(moving[0]), self._pieces.spans
        of_pieces = rows_of_pieces(rows, self._position, len(spans))
        done, coming = 0, self._fetch(0, states.up)
        try:
            for k, span in enumerate(spans):
                owner, coming = coming, self._fetch(k + 1, states.up)
                owner.hold(self._ring.link)
                self._call(stage, [gradient[span]], of_pieces, tensors=[k])
                self._ring.give_back(self._turn + k, owner, self._pairs(k, written, upwards=False))
                done = k + 1
        except BaseException as error:
            if done == 0:
                raise
            raise ended_after(spans[done - 1].stop, self._bucket.params[self._position], error) from error
        return Written(self._bucket.params, self._bucket.states)

    def _fetch(self, k: int, names: Collection[str]) -> BufferOwner:
        """Begins to copy up what piece k reads; nothing after the last piece."""
        owner = BufferOwner()
        if k < len(self._pieces.spans):
            self._ring.take(self._turn + k, owner)
            owner.fetch(self._ring.link, self._pairs(k, names, upwards=True))
        return owner

    def _pairs(self, k: int, names: Collection[str], upwards: bool) -> Pairs:
        """The states of a piece with these names: pairs of a tensor to write and its source."""
        views, homes = self._states[k], self._pieces.homes[k]
        return [(views[n], homes[n]) if upwards else (homes[n], views[n]) for n in sorted(names) if n in homes]
