"""The runs of elements that a file has scales of: they follow from a parameter's shape and the block alone.

A run is along one dimension, in which small dimensions behind it are joined. Its length divides a block, so a run has
one scale. Runs divide the parts of their dimension on two, four and eight processes. Other dimensions are cut anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rulec.torch.tensors.dtensor import is_split

#: The number of parts of a dimension that runs divide, and the least size of a dimension that is not joined with the
#: one before it: a kernel of 3 by 3 is cut by nobody.
_PARTS, _LEAST = 8, 8


@dataclass(frozen=True)
class Runs:
    """Runs of `length` elements along the dimension `axis` of a tensor with this `shape`, and those behind it."""

    shape: tuple[int, ...]
    axis: int
    length: int

    def counted(self, here: Sequence[int], count: int) -> tuple[int, ...]:
        """The shape of an array with a number for each `count` elements along the runs, of the part `here`."""
        if count == 1:
            return tuple(here)
        return (*here[: self.axis], math.prod(here[self.axis :]) // count)


def whole_shape(param: Any) -> tuple[int, ...]:
    """The shape of a parameter as kernels see it, with all its parts."""
    return (*param.shape, 2) if param.is_complex() else tuple(param.shape)


def runs_of(param: Any, block: int) -> Runs:
    """The runs of a parameter, in blocks of this many elements. A parameter of one dimension has a run an element."""
    shape = whole_shape(param)
    axis = next((i for i in range(len(shape) - 1, 0, -1) if shape[i] >= _LEAST), min(1, len(shape) - 1))
    if param.dim() < 2:
        return Runs(shape, axis, 1)
    size = math.prod(shape[axis:])
    return Runs(shape, axis, min(block, max(1, (size & -size) // _PARTS)))


def cuts_fit(param: Any, runs: Runs) -> bool:
    """Whether every part of a parameter has whole runs, cut as torch cuts an array with a number for each run."""
    if runs.length == 1 or not is_split(param):
        return True
    cuts = [(p.dim, n) for p, n in zip(param.placements, param.device_mesh.shape, strict=True) if not p.is_replicate()]
    if any(axis > runs.axis and n > 1 for axis, n in cuts):
        return False
    counts = [n for axis, n in cuts if axis == runs.axis and n > 1]
    size, rest = runs.shape[runs.axis], math.prod(runs.shape[runs.axis + 1 :])
    if len(counts) == 1:
        return bool(-(-size // counts[0]) * rest == runs.length * -(-(size * rest // runs.length) // counts[0]))
    parts = math.prod(counts)
    return bool(size % parts == 0 and size * rest % (parts * runs.length) == 0)
