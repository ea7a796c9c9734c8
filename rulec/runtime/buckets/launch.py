"""The tensors of a bucket that fire together: one part for each set of tensors, used in many steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rulec.errors import TensorError
from rulec.kernel.multi_tensor.address import chosen
from rulec.runtime.arrays import Arrays
from rulec.runtime.buckets.bucket import Bucket, Tensor
from rulec.runtime.buckets.flat import Remembered
from rulec.runtime.distributed.process_group import Peers
from rulec.runtime.distributed.sharing import Work

Places = np.ndarray[Any, np.dtype[np.int64]]

#: How many of so many tensors, with matrices `(batch, rows, cols)`, are in one stack.
StackSize = Callable[[tuple[int, int, int], int], int]

#: Tensors with scratch of more elements than this in total are updated one portion after the other.
LARGE = 1 << 22


class Portion:
    """Tensors of a part that go through all stages of a step together.

    `places` are their places in the part, None for all; `positions` are their places in the bucket.
    """

    def __init__(self, part: Part, places: list[int] | None) -> None:
        self.bucket, self.places = part.bucket, places
        all_positions = part.positions if part.positions is not None else range(len(part.bucket.tensors))
        self.positions = [*all_positions] if places is None else [all_positions[i] for i in places]
        self.fired = part.positions if places is None else self.positions
        self.at = np.array(self.positions, np.int64)
        self.groups = part.bucket.groups[self.at]
        #: A slice of everything where these are all tensors of the bucket, in order, else None.
        self.whole = slice(None) if self.fired is None else None
        #: The work on each whole tensor of which these are parts, by what it follows from.
        self.works: dict[Any, Sequence[Work]] = {}
        self._parted: dict[frozenset[str], list[tuple[tuple[Peers, ...], Places]]] = {}

    def __len__(self) -> int:
        return len(self.positions)

    def pick(self, items: Sequence[Any]) -> Sequence[Any]:
        """The items of these tensors, from items for all tensors of the part."""
        return items if self.places is None else chosen(items, self.places)

    def parted(self, axes: frozenset[str]) -> list[tuple[tuple[Peers, ...], Places]]:
        """The places of parts of tensors, by the processes for completing a reduction without these axes."""
        if axes not in self._parted:
            by_peers: dict[tuple[Peers, ...], list[int]] = {}
            for place, tensor in enumerate(self.tensors):
                if peers := tensor.beyond(axes):
                    by_peers.setdefault(peers, []).append(place)
            self._parted[axes] = [(peers, np.array(places)) for peers, places in by_peers.items()]
        return self._parted[axes]

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors."""
        return [self.bucket.tensors[i] for i in self.positions]

    @property
    def remembered(self) -> Remembered | None:
        """The memory of steps of these tensors; None where each tensor's vectors are computed on their own."""
        bucket = self.bucket
        if not bucket.library.flattens or bucket.parted or bucket.layout.formats:
            return None
        return bucket.sets.of(self.fired, len(bucket.tensors), self._new_memory)

    def _new_memory(self) -> Remembered:
        return Remembered([(t.view.batch, t.view.rows, t.view.cols) for t in self.tensors], self.bucket.library)

    @property
    def states(self) -> list[dict[str, Any]]:
        """The states of each tensor."""
        return [self.bucket.states[i] for i in self.positions]

    @cached_property
    def index(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The row of each tensor of the bucket in a table with one row for each tensor of the portion."""
        index = np.zeros(len(self.bucket.tensors), np.int64)
        index[self.at] = np.arange(len(self.at))
        return index


@dataclass
class Part:
    """The tensors of one bucket that fire together.

    `positions` are their places in the bucket, None for all of it in order. `pick` selects their gradients from the
    gradients of the whole step; None for all of them. `check` checks gradients and makes them readable for kernels.
    """

    bucket: Bucket
    positions: list[int] | None
    fired: Any
    pick: Callable[[Sequence[Any]], Sequence[Any]] | None
    check: Callable[[Sequence[Any]], Sequence[Any]]
    _portions: dict[Any, list[Portion]] = field(default_factory=dict, repr=False)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that fire."""
        return self.bucket.tensors if self.positions is None else [self.bucket.tensors[i] for i in self.positions]

    def portions(self, most: int | None, stack_size: StackSize | None = None) -> list[Portion]:
        """The tensors as one portion, or as several of at most so many elements, or of one tensor.

        With `stack_size`, tensors of one stack are in one portion, and follow one another.
        """
        portions = self._portions.get((most, stack_size is None))
        if portions is None:
            cuts = [None] if most is None else [*self._cut(most, self._sets(stack_size))]
            portions = [Portion(self, None if len(cuts) == 1 else places) for places in cuts]
            self._portions[most, stack_size is None] = portions
        return portions

    def _sets(self, stack_size: StackSize | None) -> Iterator[list[int]]:
        """The places of tensors that are not parted."""
        tensors = self.tensors
        if stack_size is None:
            yield from ([place] for place in range(len(tensors)))
            return
        alike: dict[tuple[int, int, int], list[int]] = {}
        for place, tensor in enumerate(tensors):
            alike.setdefault((tensor.view.batch, tensor.view.rows, tensor.view.cols), []).append(place)
        for shape, places in sorted(alike.items()):
            count = stack_size(shape, len(places))
            yield from (places[k : k + count] for k in range(0, len(places), count))

    def _cut(self, most: int, sets: Iterator[list[int]]) -> Iterator[list[int]]:
        tensors = self.tensors
        portion: list[int] = []
        size = 0
        for places in sets:
            more = sum(tensors[place].numel for place in places)
            if portion and size + more > most:
                yield portion
                portion, size = [], 0
            portion += places
            size += more
        yield portion


#: The number of remembered sets of tensors.
_SETS = 1024


class Partitions:
    """The parts of sets of tensors, by their ids.

    `known` has the sets seen since tensors last moved, or joined buckets.
    """

    def __init__(self, tensors: Sequence[Tensor], arrays: Arrays) -> None:
        self._tensors, self._arrays = tensors, arrays
        self.known: dict[tuple[int, ...], list[Part]] = {}

    def forget(self) -> None:
        """Forgets all parts, because tensors moved or joined buckets."""
        self.known = {}

    def cut(self, ids: tuple[int, ...]) -> list[Part]:
        """The parts of a new set of tensors, all in buckets; TensorError for a tensor named twice."""
        if len(self.known) >= _SETS:
            self.known.clear()
        places: dict[int, list[int]] = {}
        for place, i in enumerate(ids):
            places.setdefault(id(self._tensors[i].bucket), []).append(place)
        parts = [self._part([self._tensors[ids[p]] for p in at], at, len(ids)) for at in places.values()]
        self.known[ids] = parts
        return parts

    def _part(self, tensors: list[Tensor], places: list[int], total: int) -> Part:
        bucket = tensors[0].bucket
        assert bucket is not None
        positions = [t.position for t in tensors]
        if len(set(positions)) != len(positions):
            raise TensorError("a tensor is updated twice in one call: give each its whole gradient once")
        names = [t.name for t in tensors]
        check = self._arrays.gradient_check([t.array for t in tensors], bucket.layout.dtype("g"), names)
        pick: Callable[[Sequence[Any]], Sequence[Any]] | None = None
        if len(places) != total:
            pick = lambda arrays: chosen(arrays, places)  # noqa: E731
        if positions == list(range(len(bucket.tensors))):
            return Part(bucket, None, None, pick, check)
        return Part(bucket, positions, np.array(positions), pick, check)
