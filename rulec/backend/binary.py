"""What a backend may offer for binary layers: the product of packed bits, its convolution, and drawing them.

Bits lie in words of 64, the first in the lowest bit of the first word; those behind the last are zero.
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
    """How many words hold so many bits."""
    return -(-bits // WORD_BITS)


@dataclass(frozen=True)
class Window:
    """The sizes of a convolution of packed bits, each member with weights of its own; of a product, all 1 but three.

    Inputs are (members, samples, height, width, words), weights (members, outputs, *kernel, words), results int32
    (members, samples, *out, outputs). `bits` are those of a position. Outside the inputs there is nothing to count.
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
        """The words of a position."""
        return words_of(self.bits)

    @cached_property
    def out(self) -> tuple[int, int]:
        """Height and width of the results."""
        return self._out(0), self._out(1)

    def _out(self, axis: int) -> int:
        return (self.size[axis] + 2 * self.padding[axis] - self.kernel[axis]) // self.stride[axis] + 1

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """That of the results."""
        return self.members, self.samples, *self.out, self.outputs

    def first(self, axis: int) -> Counts:
        """For each position of the results along an axis, where its kernel begins in the inputs: maybe before them."""
        return np.arange(self.out[axis]) * self.stride[axis] - self.padding[axis]

    def inside(self, axis: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """For each position of the results along an axis, which places of the kernel lie inside the inputs."""
        at = self.first(axis)[:, None] + np.arange(self.kernel[axis])
        return np.asarray((at >= 0) & (at < self.size[axis]))


@dataclass(frozen=True)
class Bits:
    """Which bits are drawn: those of a layer's elements at a step, for directions 0 to `directions`, for each sign.

    The word of an element is that of `rulec.es.streams` for purpose BITS; of the second sign, its complement.
    """

    seed: int
    layer: int
    step: int
    directions: int
    signs: int = 1

    @property
    def members(self) -> int:
        """How many are drawn, in the order (sign, direction)."""
        return self.signs * self.directions


class BinaryKernels(Protocol):
    """The kernels. Arrays are those of the backend, contiguous; words are uint64."""

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
