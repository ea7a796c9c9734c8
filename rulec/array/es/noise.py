"""The random numbers of one array in one step, of NumPy or CuPy: made by the kernels of a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.backend.capabilities import Noise
from rulec.es.families.draws import Draws
from rulec.es.streams import NOISE, SCALE, Stream, short_weights


@dataclass(frozen=True)
class ArrayDraws(Draws):
    """What `rulec.es.families` draws from. `fill` is the `fill_noise` of the arrays' backend."""

    xp: Any
    fill: Callable[[Any, Noise], None]
    kind: Any
    stream: Stream
    dtype: Any

    def values(self, directions: Sequence[int], purpose: int, shape: tuple[int, ...]) -> Any:
        """One direction after the other."""
        return self._filled(np.array([SCALE[self.kind]]), directions, purpose, shape)

    def _filled(self, weights: Any, firsts: Sequence[int], purpose: int, shape: tuple[int, ...]) -> Any:
        out = self.xp.empty((len(firsts), *shape), self.dtype)
        number = np.float64 if out.dtype == np.float64 else np.float32
        stream = self.stream
        for line, first in zip(out, firsts, strict=True):
            noise = Noise(self.kind, stream.seed, stream.layer, stream.step, weights.astype(number), first, purpose)
            self.fill(line, noise)
        return out

    def orders(self, directions: Sequence[int], purpose: int, count: int) -> Any:
        """The orders that sort the lines' words."""
        orders = [self.stream.of(direction, purpose).permutation(count) for direction in directions]
        return self.xp.asarray(np.stack(orders))

    def added_at(self, array: Any, columns: Any, values: Any) -> Any:
        """The array, which is written to."""
        array[:, columns] += values
        return array

    def summed_at(self, size: int, place: Any, values: Any) -> Any:
        """A vector with values summed at places."""
        return self.xp.bincount(place, weights=values, minlength=size).astype(self.dtype)

    def summed(self, weights: Any, shape: tuple[int, ...]) -> Any:
        """The weighted sum of all directions' own noise."""
        return self._filled(short_weights(weights, self.kind), [0], NOISE, shape)[0]

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
