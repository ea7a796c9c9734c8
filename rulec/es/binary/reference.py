"""The kernels of binary layers in NumPy. Those of every backend must give the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from rulec.backend.binary import Bits, Window
from rulec.es.binary.packing import pack, unpack
from rulec.es.streams import BITS, Stream

Array = np.ndarray[Any, Any]


class ReferenceKernels:
    """See `rulec.backend.binary.BinaryKernels`."""

    def convolve(self, inputs: Array, weights: Array, window: Window) -> Array:
        """2*(equal bits) - (all bits), int32 of shape `window.shape`."""
        totals = np.zeros(window.shape, np.int32)
        rows, columns = window.inside(0), window.inside(1)
        for y, x in product(*map(range, window.kernel)):
            there: Any = (slice(None), slice(None), *np.ix_(rows[:, y], columns[:, x]))
            at = np.ix_(window.first(0)[rows[:, y]] + y, window.first(1)[columns[:, x]] + x)
            places: Any = (slice(None), slice(None), *at)
            totals[there] += _agreement(inputs[places], weights[:, :, y, x], window.bits)
        return totals

    def draw(self, thresholds: Array, shape: Sequence[int], bits: Bits) -> Array:
        """Words (members, *shape[:-1], words): 1 where an element's word is below its threshold."""
        flat = thresholds.reshape(-1)
        stream = Stream(bits.seed, bits.layer, bits.step, purpose=BITS)
        drawn = [stream.of(direction).words(flat.size) for direction in range(bits.directions)]
        members = [word ^ np.uint32(0xFFFFFFFF * sign) for sign in range(bits.signs) for word in drawn]
        return pack(np.stack([word < flat for word in members]).reshape(bits.members, *shape))

    def weighted_sum(self, words: Array, weights: Array, count: int) -> Array:
        """The sum over members of weight times bit, float64 (..., count)."""
        total = np.zeros((*words.shape[1:-1], count))
        for member, weight in zip(words, weights, strict=True):
            total += np.where(unpack(member, count), weight, 0.0)
        return total


def _agreement(inputs: Array, weights: Array, bits: int) -> Array:
    """2*(equal bits) - (all bits) of inputs (members, samples, y, x, words) with weights (members, outputs, words)."""
    differing = np.zeros((*inputs.shape[:-1], weights.shape[1]), np.int32)
    for word in range(inputs.shape[-1]):
        kernel = weights[:, None, None, None, :, word]
        differing += np.bitwise_count(inputs[..., word, None] ^ kernel)
    return np.asarray(bits - 2 * differing, np.int32)
