"""Binary layers of every backend: the arrays and the sizes for a kernel."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rulec.array_api.random import WORD
from rulec.backend.binary import WORD_BITS, Bits, Window, words_of
from rulec.es.binary.packing import contiguous
from rulec.es.streams import BITS, Stream


class PackedBits(ABC):
    """The kernels over the arrays of a `library`, NumPy or CuPy: see `rulec.backend.binary`."""

    def __init__(self, library: Any) -> None:
        self._arrays = library

    def convolve(self, inputs: Any, weights: Any, window: Window) -> Any:
        """2*(equal bits) - (all bits), int32 of shape `window.shape`."""
        results = self._arrays.empty(window.shape, np.int32)
        if results.size:
            self._multiply(inputs, weights, results, window)
        return results

    def draw(self, thresholds: Any, shape: Sequence[int], bits: Bits) -> Any:
        """Words (members, *shape[:-1], words): 1 where an element's word is below its threshold."""
        results = self._arrays.empty((bits.members, *shape[:-1], words_of(shape[-1])), np.uint64)
        seed, layer = Stream(bits.seed, bits.layer, bits.step, 0).key
        told = {
            "members": bits.members, "rows": math.prod(shape[:-1]), "count": int(shape[-1]), "words": results.shape[-1],
            "directions": bits.directions, "purpose": BITS, "step": bits.step & WORD, "seed": seed, "layer": layer,
        }  # fmt: skip
        self._draw(thresholds, results, told)
        return results

    def weighted_sum(self, words: Any, weights: Any, count: int) -> Any:
        """The sum over members of weight times bit, float64 (..., count)."""
        shape = words.shape[1:]
        sums = self._arrays.zeros((*shape, WORD_BITS))
        told = {"members": len(words), "total": math.prod(shape)}
        self._add(contiguous(words), self._arrays.asarray(weights), sums, told)
        return sums.reshape(*shape[:-1], shape[-1] * WORD_BITS)[..., :count]

    @abstractmethod
    def _multiply(self, inputs: Any, weights: Any, results: Any, window: Window) -> None:
        """Writes the results of a convolution, at least one."""

    @abstractmethod
    def _draw(self, thresholds: Any, results: Any, told: Mapping[str, int]) -> None:
        """Writes words of `told["rows"]` lines of `told["count"]` bits for each member."""

    @abstractmethod
    def _add(self, words: Any, weights: Any, sums: Any, told: Mapping[str, int]) -> None:
        """Adds the bits of members, `told["total"]` words of each, to sums of zero."""
