"""Tensors that fire together, cut into parts by bucket, once for each set of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rulec.errors import TensorError
from rulec.runtime.arrays import Arrays
from rulec.runtime.bucket import Tensor
from rulec.runtime.part import Part

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
            pick = lambda arrays: [arrays[i] for i in places]  # noqa: E731
        if positions == list(range(len(bucket.tensors))):
            return Part(bucket, None, None, pick, check)
        return Part(bucket, positions, np.array(positions), pick, check)
