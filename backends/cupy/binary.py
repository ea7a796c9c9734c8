"""Binary layers on a GPU, for CuPy's arrays: CUDA C, compiled by NVRTC."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rulec.backend.binary import Window

from ..common.binary import PackedBits
from ..cstyle.binary_words import DRAW
from .binary_source import SIDE, THREADS
from .memory import Modules


class CupyBinary(PackedBits):
    """The kernels for CuPy's arrays, of the modules of their source; they run in CuPy's current stream."""

    def __init__(self, modules: Modules) -> None:
        import cupy

        super().__init__(cupy)
        self._modules = modules

    def _multiply(self, inputs: Any, weights: Any, results: Any, window: Window) -> None:
        rows = window.samples * window.out[0] * window.out[1]
        tiles = -(-rows // SIDE), -(-window.outputs // SIDE)
        sizes = (window.samples, *window.size, window.words, window.bits, window.outputs, *window.kernel)
        numbers = (*sizes, *window.stride, *window.padding, *window.out, *tiles)
        self._launch("multiply_bits", window.members * math.prod(tiles), (inputs, weights, results), numbers)

    def _draw(self, thresholds: Any, results: Any, told: Mapping[str, int]) -> None:
        sizes = [told[name] for name in DRAW]
        self._launch("draw_bits", -(-results.size // THREADS), (thresholds, results), sizes)

    def _add(self, words: Any, weights: Any, sums: Any, told: Mapping[str, int]) -> None:
        sizes = told["members"], told["total"]
        self._launch("add_bits", -(-sums.size // THREADS), (words, weights, sums), sizes)

    def _launch(self, name: str, blocks: int, arrays: Sequence[Any], sizes: Sequence[int]) -> None:
        """A kernel over arrays of the current device."""
        kernel = self._modules.functions("binary layers", arrays[0].device.id)(name)
        kernel((blocks,), (THREADS,), (*(int(a.data.ptr) for a in arrays), *map(int, sizes)))
