"""The layout of shards in a global tensor, and the cross-process reduction of results over shards.

The ranks of a mesh cut a tensor along its dimensions. `ShardLayout` says where every shard of a tensor and of its
states lies. A reduction that removes a cut axis is complete once the results of the ranks along it are reduced
(`PartialReduction`). The reductions of several waiting launches travel together: there is one message for each
operation and each dimension of the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from rulec.array_api.library import Library
from rulec.array_api.slices import Piece
from rulec.compiler.view import MatrixView
from rulec.language.expr.node import Op
from rulec.runtime.distributed.all_to_all import Sharding
from rulec.runtime.distributed.owners import Division, Rectangle
from rulec.runtime.distributed.process_group import RankGroup, StepCoordinator


@dataclass(frozen=True)
class ShardLayout:
    """The layout of a tensor's shards over ranks, and of arrays beside them: rows, columns, numbers, states.

    `view` is the view of the local shard. `spread` is the sharding of the tensor, and `shape` its global shape.
    `shapes` has, by name, the global shapes of states with a shape of their own.
    """

    view: MatrixView
    shape: tuple[int, ...]
    spread: Sharding
    shapes: Mapping[str, tuple[int, ...]]
    _divisions: dict[Any, Division] = field(default_factory=dict, repr=False)

    @cached_property
    def alone(self) -> ShardLayout:
        """The layout among the ranks of one replica."""
        assert self.spread.alone is not None
        return ShardLayout(self.view, self.shape, self.spread.alone, self.shapes)

    @property
    def whole(self) -> MatrixView:
        """The view of the global tensor."""
        return self.view.whole or self.view

    @property
    def long(self) -> int:
        """The dimension of the longer side of the matrices, along which several owner ranks have pieces of a matrix."""
        letter = "i" if self.whole.rows > self.whole.cols else "j"
        return next((d for d in range(len(self.shape)) if self.view.axis(d) == letter), 0)

    def sides(self, letters: str) -> tuple[int, ...]:
        """The global shape of an array with these axes of the matrices, b, i and j; 1 along the other axes."""
        return tuple(n if self.view.axis(d) in letters else 1 for d, n in enumerate(self.shape))

    def along(self, letters: str) -> Division:
        """The division over ranks of an array with these axes."""
        key = "".join(letter for letter in "bij" if letter in letters)
        if key not in self._divisions:
            kept = [self.view.axis(d) in key for d in range(len(self.shape))]
            rectangles = tuple(
                tuple(side if keep else slice(0, 1) for side, keep in zip(rectangle, kept, strict=True))
                for rectangle in self.spread.division.rectangles
            )
            self._divisions[key] = Division(rectangles)
        return self._divisions[key]

    def state(self, name: str) -> Division:
        """The division over ranks of a state with a shape of its own."""
        shape = self.shapes[name]
        if shape not in self._divisions:
            self._divisions[shape] = self.spread.divided(shape)
        return self._divisions[shape]

    def part(self, division: Division) -> Rectangle:
        """The local shard of a divided array."""
        return division.rectangles[self.spread.rank_group.rank]

    def tensor(self, matrices: Any, letters: str, whole: bool) -> Any:
        """An array `(batch, rows, cols)` in the tensor's dimensions: global if `whole`, else of the local shard."""
        part = [side.stop - side.start for side in self.part(self.along(letters))]
        return (matrices.swapaxes(1, 2) if self.view.transposed else matrices).reshape(
            self.sides(letters) if whole else part
        )

    def matrices(self, array: Any, letters: str, whole: bool) -> Any:
        """The inverse of `tensor`."""
        batch, rows, cols = self.extents(letters, whole)
        if self.view.transposed:
            return array.reshape(batch, cols, rows).swapaxes(1, 2)
        return array.reshape(batch, rows, cols)

    def extents(self, letters: str, whole: bool = True) -> tuple[int, int, int]:
        """The matrices, rows and columns of an array with these axes: global if `whole`, else of the local shard."""
        view = self.whole if whole else self.view
        b, i, j = (letter in letters for letter in "bij")
        return view.batch if b else 1, view.rows if i else 1, view.cols if j else 1


Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class GlobalTensor:
    """The global tensor of a local shard: its shape, and for each cut the dimension and the ranks along it.

    `piece` has the positions of the shard's elements in the global tensor, and `indices` has them along each dimension.
    `spread` is the sharding over all ranks; None where a shard is no rectangle.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, RankGroup], ...]
    piece: Piece
    indices: tuple[Sequence[int], ...]
    spread: Sharding | None = None


@dataclass(frozen=True)
class PartialReduction:
    """Results over local shards, an array in float64, and the rank groups to reduce them over, one after the other."""

    op: Op
    values: Any
    rank_groups: tuple[RankGroup, ...]


@dataclass(frozen=True)
class Partials:
    """Yielded to ask for complete reductions; the scheduler resumes the launch with the value of each."""

    parts: Sequence[PartialReduction]
    library: Library


def completed(waiting: Sequence[Partials], coordinator: StepCoordinator) -> list[list[Any]]:
    """Completes the partial reductions of all waiting launches over their rank groups.

    Every rank has the same tensors in the same order, so all send the same messages in the same order. A rank that
    fails sends placeholder data, and its error is kept in `coordinator.failure`.
    """
    parts = [part for partials in waiting for part in partials.parts]
    libraries = [partials.library for partials in waiting for _ in partials.parts]
    values = [part.values for part in parts]
    attempt = coordinator.failure.attempt
    ways = dict.fromkeys((part.op, rank_group) for part in parts for rank_group in part.rank_groups)
    coordinator.check()
    for op, rank_group in ways:
        places = [i for i, part in enumerate(parts) if part.op is op and rank_group in part.rank_groups]
        message = attempt(partial(_joined, places, values, libraries[places[0]]))
        if message is None:
            message = np.zeros(sum(math.prod(values[i].shape) for i in places))
        whole = coordinator.reduce(op, rank_group, message)
        attempt(partial(_put_back, places, values, libraries, whole))
    coordinator.close()
    results = iter(values)
    return [[next(results) for _ in partials.parts] for partials in waiting]


def _joined(places: Sequence[int], values: Sequence[Any], library: Library) -> Any:
    flat = [library.numbers(values[i]).reshape(-1) for i in places]
    return library.join(flat, 0) if len(flat) > 1 else flat[0]


def _put_back(places: Sequence[int], values: list[Any], libraries: Sequence[Library], whole: Any) -> None:
    begin = 0
    for i in places:
        shape = tuple(values[i].shape)
        values[i] = libraries[i].numbers(whole[begin : (begin := begin + math.prod(shape))]).reshape(shape)
