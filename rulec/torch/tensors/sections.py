"""Fused parameters: a group's `split` says which tensors its parameters are joined of, as query, key and value are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor

from rulec.errors import HyperError, TensorError


@dataclass(frozen=True)
class Section:
    """One of the tensors that a parameter is joined of: its indices `start` to `stop` of a dimension.

    `number` counts them from 0. Of these indices, `length` are local, from the local index `begin` on.
    """

    dim: int
    start: int
    stop: int
    number: int
    begin: int
    length: int

    def name(self, of: str) -> str:
        """The name in messages, of a section of the parameter with this name."""
        return f"{of}[{self.number}]"

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of a section of a parameter with this shape."""
        return (*whole[: self.dim], self.stop - self.start, *whole[self.dim + 1 :])

    def of(self, here: Tensor) -> Tensor:
        """The local section of a tensor, not a copy: of a parameter, or of its gradient."""
        return here.narrow(self.dim, self.begin, self.length) if here.dim() > self.dim else here


def checked_split(group: Mapping[str, Any]) -> tuple[int | tuple[int, ...] | None, int]:
    """A group's `split` and `split_dim`, as they are kept; HyperError where they are none."""
    split, dim = group.get("split"), group.get("split_dim") or 0
    if type(dim) is not int or dim < 0:
        raise HyperError(f"split_dim={dim!r} of a group must be a dimension, counted from 0")
    if split is None:
        if dim:
            raise HyperError(f"split_dim={dim} of a group says where split= cuts: give split, or leave it out")
        return None, 0
    sizes = [split] if type(split) is int else split
    if not isinstance(sizes, list | tuple) or not sizes or not all(type(n) is int and n > 0 for n in sizes):
        raise HyperError(f"split={split!r} of a group must be a number of equal parts, or the sizes of its parts")
    return split if type(split) is int else tuple(sizes), dim


def bounds_of(group: Mapping[str, Any], param: Tensor, name: str) -> tuple[int, list[tuple[int, int]]]:
    """The dimension that a group's `split` cuts a parameter along, and the first and last index of each section.

    TensorError where it does not fit the parameter. No section where the group has no `split`.
    """
    split, dim = checked_split(group)
    if split is None:
        return 0, []
    if param.dim() < 2:
        raise TensorError(
            f"{name} has {param.dim()} dimension{'s' * (param.dim() != 1)}, and split={split} is for matrices: give "
            f"it a group without split"
        )
    if param.is_complex():
        raise TensorError(f"{name} is complex, and split={split} is for real parameters: give its parts one by one")
    if dim >= param.dim():
        raise TensorError(f"{name} has no dimension {dim} for split={split}: its dimensions are 0 to {param.dim() - 1}")
    size = param.shape[dim]
    if isinstance(split, int):
        if size % split:
            raise TensorError(f"split={split} does not divide dimension {dim} of {name}, which has {size}: give sizes")
        split = (size // split,) * split
    if sum(split) != size:
        raise TensorError(
            f"split={[*split]} adds up to {sum(split)}, and dimension {dim} of {name} has {size}: give sizes that add "
            f"up to it"
        )
    ends = [*accumulate(split)]
    return dim, [*zip([0, *ends], ends, strict=False)]
