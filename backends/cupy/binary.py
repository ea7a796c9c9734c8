"""Binary layers on a GPU, for CuPy's arrays: CUDA C, compiled by NVRTC."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rulec.backend.binary import WORD_BITS, Bits, Window, words_of
from rulec.es.binary.packing import contiguous
from rulec.es.streams import BITS, DOMAIN

from .binary_source import SIDE, THREADS

if TYPE_CHECKING:
    from . import Modules

_WORD = 0xFFFFFFFF


class CupyBinary:
    """The kernels for CuPy's arrays, of the modules of their source; they run in CuPy's current stream."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules

    def convolve(self, inputs: Any, weights: Any, window: Window) -> Any:
        """2*(equal bits) - (all bits), int32 of shape `window.shape`."""
        import cupy

        results = cupy.empty(window.shape, np.int32)
        if results.size:
            rows = window.samples * window.out[0] * window.out[1]
            tiles = -(-rows // SIDE), -(-window.outputs // SIDE)
            sizes = (window.samples, *window.size, window.words, window.bits, window.outputs, *window.kernel)
            given = (*sizes, *window.stride, *window.padding, *window.out, *tiles)
            self._launch("multiply_bits", window.members * math.prod(tiles), (inputs, weights, results), given)
        return results

    def draw(self, thresholds: Any, shape: Sequence[int], bits: Bits) -> Any:
        """Words (members, *shape[:-1], words): 1 where an element's word is below its threshold."""
        import cupy

        results = cupy.empty((bits.members, *shape[:-1], words_of(shape[-1])), np.uint64)
        sizes = (bits.members, math.prod(shape[:-1]), int(shape[-1]), words_of(shape[-1]), bits.directions)
        position = (BITS, bits.step & _WORD, bits.seed & _WORD, (bits.layer + DOMAIN) & _WORD)
        self._launch("draw_bits", -(-results.size // THREADS), (thresholds, results), (*sizes, *position))
        return results

    def weighted_sum(self, words: Any, weights: Any, count: int) -> Any:
        """The sum over members of weight times bit, float64 (..., count)."""
        import cupy

        shape = words.shape[1:]
        sums = cupy.empty((*shape, WORD_BITS), np.float64)
        arrays = (contiguous(words), cupy.asarray(weights), sums)
        self._launch("add_bits", -(-sums.size // THREADS), arrays, (len(words), math.prod(shape)))
        return sums.reshape(*shape[:-1], shape[-1] * WORD_BITS)[..., :count]

    def _launch(self, name: str, blocks: int, arrays: Sequence[Any], sizes: Sequence[int]) -> None:
        """A kernel over arrays of the current device."""
        kernel = self._modules.functions("binary layers", arrays[0].device.id)(name)
        kernel((blocks,), (THREADS,), (*(int(a.data.ptr) for a in arrays), *map(int, sizes)))
