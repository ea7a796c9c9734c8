"""Optional kernels of a backend for binary layers: products and convolutions of packed bits, and draws of bits.

Bits lie in words of 64, the first in the lowest bit of the first word; bits behind the last one are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

#: The bits of a word.
WORD_BITS = 64

Counts = np.ndarray[Any, np.dtype[np.int64]]


def words_of(bits: int) -> int:
    """The number of words for `bits` bits."""
    return -(-bits // WORD_BITS)


@dataclass(frozen=True)
class Window:
    """The sizes of a convolution of packed bits, each member with weights of its own.

    Inputs are (members, samples, height, width, words), weights (members, outputs, *kernel, words), results int32
    (members, samples, *out, outputs). `bits` is the number of bits of a position. A product is a convolution with a
    size of (1, 1). Positions outside the inputs are not counted.
    """

    members: int
    samples: int
    size: tuple[int, int]
    bits: int
    outputs: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)

    @property
    def words(self) -> int:
        """The number of words of a position."""
        return words_of(self.bits)

    @cached_property
    def out(self) -> tuple[int, int]:
        """Height and width of the results."""
        return self._out(0), self._out(1)

    def _out(self, axis: int) -> int:
        return (self.size[axis] + 2 * self.padding[axis] - self.kernel[axis]) // self.stride[axis] + 1

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """The shape of the results."""
        return self.members, self.samples, *self.out, self.outputs

    def first(self, axis: int) -> Counts:
        """For each position of the results along an axis, the start of its kernel in the inputs; it may be negative."""
        return np.arange(self.out[axis]) * self.stride[axis] - self.padding[axis]

    def inside(self, axis: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Positions of the results by places of the kernel along an axis: whether a place lies inside the inputs."""
        at = self.first(axis)[:, None] + np.arange(self.kernel[axis])
        return np.asarray((at >= 0) & (at < self.size[axis]))


@dataclass(frozen=True)
class Bits:
    """The bits to draw: of a layer's elements at a step, for each sign and each direction below `directions`.

    The word of an element is in `rulec.es.streams` under purpose BITS; the second sign has its complement.
    """

    seed: int
    layer: int
    step: int
    directions: int
    signs: int = 1

    @property
    def members(self) -> int:
        """The number of members, in the order (sign, direction)."""
        return self.signs * self.directions


class BinaryKernels(Protocol):
    """The kernels. Arrays are of the backend's kind and contiguous; words are uint64."""

    def convolve(self, inputs: Any, weights: Any, window: Window) -> Any:
        """2*(equal bits) - (all bits), int32 of shape `window.shape`."""
        ...

    def draw(self, thresholds: Any, shape: Sequence[int], bits: Bits) -> Any:
        """Words (members, *shape[:-1], words): 1 where an element's word is below its threshold (uint32, `shape`)."""
        ...

    def weighted_sum(self, words: Any, weights: Any, count: int) -> Any:
        """The sum over members of weight times bit, float64 (..., count), of words (members, ..., words).

        `weights` (members,) are NumPy's float64. Members are added in order.
        """
        ...
