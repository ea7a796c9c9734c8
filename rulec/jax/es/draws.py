"""The random numbers of one layer in one step, as JAX's arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rulec.es.streams import NOISE, shortened
from rulec.jax.es import philox

#: How many elements' noise is made at a time where all of it is not needed together: a multiple of any block's.
CHUNK = 2**16


@dataclass(frozen=True)
class JaxDraws:
    """What `rulec.es.arithmetic` draws from. Seed, step and directions may be traced."""

    kind: str
    seed: Any
    layer: int
    step: Any
    directions: int
    dtype: Any = jnp.float32
    xp: Any = jnp

    def values(self, direction: Any, purpose: int, shape: tuple[int, ...]) -> Any:
        """Noise of mean 0 and variance 1."""
        return philox.values(self.kind, shape, **self._stream(direction, purpose), dtype=self.dtype)

    def signs(self, direction: Any, purpose: int, count: int) -> Any:
        """1 or -1 for each line."""
        return philox.whole("rademacher", (count,), **self._stream(direction, purpose)).astype(self.dtype)

    def order(self, direction: Any, purpose: int, count: int) -> Any:
        """The order that sorts the lines' words."""
        return jnp.argsort(philox.words(self.seed, self.layer, purpose, direction, self.step, count), stable=True)

    def _stream(self, direction: Any, purpose: int) -> dict[str, Any]:
        return {"seed": self.seed, "layer": self.layer, "step": self.step, "pair": direction, "purpose": purpose}

    def batched(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """`vmap`."""
        return jax.vmap(function)(*arrays)

    def one_by_one(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """`lax.map`."""
        return jax.lax.map(lambda each: function(*each), arrays)

    def fold(self, function: Callable[..., Any], start: Any, *arrays: Any) -> Any:
        """`lax.scan`, of which the end is kept."""
        return jax.lax.scan(lambda so_far, each: (function(so_far, *each), None), start, arrays)[0]

    def added_at(self, array: Any, place: Any, values: Any) -> Any:
        """The array with values added at places of its last dimension but one."""
        return array.at[..., place, :].add(values)

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

        return self.fold(add, jnp.zeros(count, self.dtype), jnp.arange(self.directions), short)

    def _unscaled(self, direction: Any, begin: Any, count: int) -> Any:
        """Noise as it is multiplied with short weights, which have its scale."""
        stream = self._stream(direction, NOISE)
        if self.kind == "normal":
            return philox.values(self.kind, (count,), **stream, dtype=self.dtype, offset=begin)
        return philox.whole(self.kind, (count,), **stream, offset=begin).astype(self.dtype)


def in_parts(size: int, function: Callable[[Any, Any, int], Any], start: Any) -> Any:
    """`start`, to which `function(so_far, begin, count)` is applied for each part of so many elements."""
    whole, rest = divmod(size, CHUNK)
    if whole:
        start = jax.lax.fori_loop(0, whole, lambda part, so_far: function(so_far, part * CHUNK, CHUNK), start)
    return function(start, whole * CHUNK, rest) if rest else start
