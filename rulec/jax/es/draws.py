"""The random numbers of one layer in one step, as JAX's arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rulec.es.families.draws import Draws
from rulec.es.streams import NOISE, shortened
from rulec.jax.es.philox import JaxStream

#: How many elements' noise is made at a time where all of it is not needed together: a multiple of any block's.
CHUNK = 2**16


@dataclass(frozen=True)
class JaxDraws(Draws):
    """What `rulec.es.families` draws from. Seed, step and directions may be traced."""

    kind: str
    seed: Any
    layer: int
    step: Any
    directions: int
    dtype: Any = jnp.float32
    xp: Any = jnp

    def values(self, directions: Sequence[Any], purpose: int, shape: tuple[int, ...]) -> Any:
        """Noise of mean 0 and variance 1."""

        def one(direction: Any) -> Any:
            return self._stream(direction, purpose).values(self.kind, math.prod(shape)).reshape(shape)

        return self._of(directions, one)

    def orders(self, directions: Sequence[Any], purpose: int, count: int) -> Any:
        """The orders that sort the lines' words."""
        return self._of(directions, lambda direction: self._stream(direction, purpose).permutation(count))

    def _of(self, directions: Sequence[Any], draw: Callable[[Any], Any]) -> Any:
        """A draw of each direction; the number of one may be larger than JAX's integers."""
        return draw(directions[0])[None] if len(directions) == 1 else jax.vmap(draw)(self.numbers(directions))

    def _stream(self, direction: Any, purpose: int) -> JaxStream:
        return JaxStream(self.seed, self.layer, self.step, direction, purpose, self.dtype)

    def batched(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """`vmap`."""
        return jax.vmap(function)(*arrays)

    def one_by_one(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """`lax.map`."""
        return jax.lax.map(lambda each: function(*each), tuple(map(self.numbers, arrays)))

    def fold(self, function: Callable[..., Any], start: Any, *arrays: Any) -> Any:
        """`lax.scan`, of which the end is kept."""
        each = tuple(map(self.numbers, arrays))
        return jax.lax.scan(lambda so_far, one: (function(so_far, *one), None), start, each)[0]

    def added_at(self, array: Any, columns: Any, values: Any) -> Any:
        """A new array."""
        return array.at[:, columns].add(values)

    def summed_at(self, size: int, place: Any, values: Any) -> Any:
        """A vector with values summed at places."""
        return jnp.zeros(size, values.dtype).at[place].add(values)

    def product(self, a: Any, b: Any) -> Any:
        """A product of matrices of full precision."""
        return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)

    def summed(self, weights: Any, shape: tuple[int, ...]) -> Any:
        """The weighted sum of all directions' own noise, of which there is a chunk at a time."""

        def fill(out: Any, begin: Any, count: int) -> Any:
            return jax.lax.dynamic_update_slice(out, self.part(weights, begin, count), (begin,))

        size = math.prod(shape)
        return in_parts(size, fill, jnp.zeros(size, self.dtype)).reshape(shape)

    def part(self, weights: Any, begin: Any, count: int) -> Any:
        """The same of `count` elements; where they begin may be traced if it is a multiple of `CHUNK`."""
        short = shortened(weights.astype(self.dtype), self.kind, jnp)

        def add(total: Any, direction: Any, weight: Any) -> Any:
            return total + weight * self._unscaled(direction, begin, count)

        return self.fold(add, self.zeros((count,)), range(self.directions), short)

    def _unscaled(self, direction: Any, begin: Any, count: int) -> Any:
        """Noise as it is multiplied with short weights, which have its scale."""
        stream = self._stream(direction, NOISE)
        if self.kind == "normal":
            return stream.values(self.kind, count, begin)
        return stream.whole(self.kind, count, begin).astype(self.dtype)


def in_parts(size: int, function: Callable[[Any, Any, int], Any], start: Any) -> Any:
    """`start`, to which `function(so_far, begin, count)` is applied for each part of so many elements."""
    whole, rest = divmod(size, CHUNK)
    if whole:
        start = jax.lax.fori_loop(0, whole, lambda part, so_far: function(so_far, part * CHUNK, CHUNK), start)
    return function(start, whole * CHUNK, rest) if rest else start
