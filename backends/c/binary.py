"""Binary layers in C99, for all members of a population, with OpenMP's threads."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rulec.backend.binary import Window
from rulec.kernel.multi_tensor.address import array_address

from ..common.binary import PackedBits
from ..common.binary_plan import Plan
from ..cstyle.binary_words import DRAW
from .binary_source import source
from .compile import library
from .threads import most, threads

Array = np.ndarray[Any, Any]


class CBinary(PackedBits):
    """The kernels for NumPy arrays."""

    def __init__(self) -> None:
        super().__init__(np)

    def _multiply(self, inputs: Array, weights: Array, results: Array, window: Window) -> None:
        plan = Plan.of(window)
        arrays = (inputs, weights, np.empty(weights.size, np.uint64), results, *plan.tables)
        _call("multiply_bits", arrays, (*plan.sizes, plan.lines, plan.spans, threads(plan.spans)))

    def _draw(self, thresholds: Array, results: Array, told: Mapping[str, int]) -> None:
        _call("draw_bits", (thresholds, results), [told[name] for name in DRAW], most())

    def _add(self, words: Array, weights: Array, sums: Array, told: Mapping[str, int]) -> None:
        _call("add_bits", (words, weights, sums), (told["members"], told["total"]), most())


def _call(name: str, arrays: Sequence[Array], sizes: Sequence[int], *more: int) -> None:
    """Calls a function of the library with a table of addresses and sizes, and with numbers after it."""
    words = [*map(array_address, arrays), *sizes]
    function = getattr(_library(), name)
    function.restype = None
    function((ctypes.c_int64 * len(words))(*words), *map(ctypes.c_int64, more))


@functools.cache
def _library() -> ctypes.CDLL:
    return library("binary", source())
