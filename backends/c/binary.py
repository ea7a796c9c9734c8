"""Binary layers in C99, for all members of a population, with OpenMP's threads."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rulec.backend.binary import WORD_BITS, Bits, Window, words_of
from rulec.es.streams import BITS, DOMAIN
from rulec.kernel.bucket.address import array_address

from ..cpu.binary_plan import Plan
from .binary_source import source
from .compile import library
from .threads import most, threads

Array = np.ndarray[Any, Any]

_WORD = 0xFFFFFFFF


class CBinary:
    """The kernels for NumPy arrays."""

    def convolve(self, inputs: Array, weights: Array, window: Window) -> Array:
        """2*(equal bits) - (all bits), int32 of shape `window.shape`."""
        results = np.empty(window.shape, np.int32)
        if results.size:
            plan = Plan.of(window)
            arrays = (inputs, weights, np.empty(weights.size, np.uint64), results, *plan.tables)
            _call("multiply_bits", arrays, (*plan.sizes, plan.lines, plan.spans, threads(plan.spans)))
        return results

    def draw(self, thresholds: Array, shape: Sequence[int], bits: Bits) -> Array:
        """Words (members, *shape[:-1], words): 1 where an element's word is below its threshold."""
        results = np.empty((bits.members, *shape[:-1], words_of(shape[-1])), np.uint64)
        sizes = (bits.members, math.prod(shape[:-1]), shape[-1], results.shape[-1], bits.directions)
        position = (BITS, bits.step & _WORD, bits.seed & _WORD, (bits.layer + DOMAIN) & _WORD)
        _call("draw_bits", (thresholds, results), (*sizes, *position), most())
        return results

    def weighted_sum(self, words: Array, weights: Array, count: int) -> Array:
        """The sum over members of weight times bit, float64 (..., count)."""
        shape = words.shape[1:]
        sums = np.zeros((*shape, WORD_BITS))
        _call("add_bits", (np.ascontiguousarray(words), weights, sums), (len(words), math.prod(shape)), most())
        return sums.reshape(*shape[:-1], shape[-1] * WORD_BITS)[..., :count]


def _call(name: str, arrays: Sequence[Array], sizes: Sequence[int], *more: int) -> None:
    """A function of the library on a table of addresses and sizes, and on numbers beside it."""
    words = [*map(array_address, arrays), *sizes]
    function = getattr(_library(), name)
    function.restype = None
    function((ctypes.c_int64 * len(words))(*words), *map(ctypes.c_int64, more))


@functools.cache
def _library() -> ctypes.CDLL:
    return library("binary", source())
