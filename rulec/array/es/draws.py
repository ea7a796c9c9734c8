"""The random numbers of one array in one step, of NumPy or CuPy: made by the kernels of a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.backend.noise import Noise
from rulec.es.streams import NOISE, SCALE, Stream, short_weights


@dataclass(frozen=True)
class ArrayDraws:
    """What `rulec.es.arithmetic` draws from. `fill` is the `fill_noise` of the arrays' backend."""

    xp: Any
    fill: Callable[[Any, Noise], None]
    kind: Any
    stream: Stream
    dtype: Any

    def values(self, direction: int, purpose: int, shape: tuple[int, ...]) -> Any:
        """Noise of mean 0 and variance 1."""
        return self._filled(self.kind, np.array([SCALE[self.kind]]), direction, purpose, shape)

    def signs(self, direction: int, purpose: int, count: int) -> Any:
        """1 or -1 for each line."""
        return self._filled("rademacher", np.ones(1), direction, purpose, (count,))

    def _filled(self, kind: Any, weights: Any, first: int, purpose: int, shape: tuple[int, ...]) -> Any:
        out = self.xp.empty(shape, self.dtype)
        number = np.float64 if out.dtype == np.float64 else np.float32
        stream = self.stream
        noise = Noise(kind, stream.seed, stream.layer, stream.step, weights.astype(number), int(first), purpose)
        self.fill(out, noise)
        return out

    def order(self, direction: int, purpose: int, count: int) -> Any:
        """The order that sorts the lines' words."""
        return self.xp.asarray(self.stream.of(int(direction), purpose).permutation(count))

    def batched(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """One after the other."""
        return self.xp.stack([function(*each) for each in zip(*map(_each, arrays), strict=True)])

    one_by_one = batched

    def fold(self, function: Callable[..., Any], start: Any, *arrays: Any) -> Any:
        """A loop."""
        for each in zip(*map(_each, arrays), strict=True):
            start = function(start, *each)
        return start

    def added_at(self, array: Any, place: Any, values: Any) -> Any:
        """The array, which is written to."""
        array[..., place, :] += values
        return array

    def summed_at(self, size: int, place: Any, values: Any) -> Any:
        """A vector with values summed at places."""
        return self.xp.bincount(place, weights=values, minlength=size).astype(self.dtype)

    def product(self, a: Any, b: Any) -> Any:
        """A product of matrices."""
        return a @ b

    def summed(self, weights: Any, shape: tuple[int, ...]) -> Any:
        """The weighted sum of all directions' own noise."""
        return self._filled(self.kind, short_weights(weights, self.kind), 0, NOISE, shape)

    def noise(self, weights: Any) -> Noise:
        """The same, for a kernel that makes it where it needs it."""
        stream = self.stream
        return Noise(self.kind, stream.seed, stream.layer, stream.step, short_weights(weights, self.kind))


def namespace(array: Any) -> Any:
    """The library of an array, of NumPy's names."""
    if isinstance(array, np.ndarray):
        return np
    import cupy

    return cupy


def _each(array: Any) -> Any:
    """The entries of the first dimension; numbers of directions as Python's."""
    return range(len(array)) if array.ndim == 1 and array.dtype.kind == "i" else array
