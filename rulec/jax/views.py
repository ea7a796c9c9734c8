"""Leaves as matrices: some axes as rows, some as columns, and the others as a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from rulec.errors import TensorError


@dataclass(frozen=True)
class View:
    """A leaf of a shape as a matrix, or as a batch of matrices where axes are neither rows nor columns."""

    shape: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]

    @property
    def batch(self) -> tuple[int, ...]:
        """The other axes."""
        return tuple(i for i in range(len(self.shape)) if i not in self.rows + self.cols)

    @property
    def axes(self) -> tuple[int, ...]:
        """All axes in the order of the view."""
        return self.batch + self.rows + self.cols

    @property
    def sides(self) -> tuple[int, int]:
        """The numbers of rows and of columns."""
        return math.prod(self.shape[i] for i in self.rows), math.prod(self.shape[i] for i in self.cols)

    def of(self, array: Any) -> Any:
        """The array as the view has it."""
        lead = [math.prod(self.shape[i] for i in self.batch)] if self.batch else []
        return jnp.transpose(array, self.axes).reshape(*lead, *self.sides)

    def back(self, array: Any) -> Any:
        """The inverse."""
        turned = array.reshape([self.shape[i] for i in self.axes])
        return jnp.transpose(turned, sorted(range(len(self.shape)), key=self.axes.__getitem__))


def view_of(shape: Sequence[int], numbers: Any, what: str) -> View:
    """The view by optax's numbers of axes; TensorError where they name one axis twice, or none of the leaf's."""
    several = len(shape)
    words = numbers.reduction_axis, numbers.output_axis
    named = [(axes,) if isinstance(axes, int) else tuple(axes) for axes in words]
    if several < 2 or any(not -several <= axis < several for axes in named for axis in axes):
        raise TensorError(f"{what} of a leaf of shape {tuple(shape)} are {named[0]} and {named[1]}: give axes it has")
    rows, cols = (tuple(axis % several for axis in axes) for axes in named)
    if len({*rows, *cols}) < len(rows + cols):
        raise TensorError(f"{what} of a leaf of shape {tuple(shape)} are {rows} and {cols}: give every axis once")
    return View(tuple(shape), rows, cols)
