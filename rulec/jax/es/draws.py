"""Random numbers of one layer in one step, as JAX's arrays, from Philox streams in words of 32 bits.

`rulec.es.streams` defines the streams of perturbations. Seed, layer, direction and step may be traced, and mapped over
by vmap. The number of elements and their kind may not. The position of their beginning may be traced if it is at the
first element of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rulec.array_api.random import ROUNDS, WORD, one_round, rounds
from rulec.es.families.base import Draws
from rulec.es.streams import DOMAIN, NOISE, Stream, shortened

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


@dataclass(frozen=True)
class JaxStream(Stream):
    """One stream in JAX, with noise of a dtype."""

    dtype: Any = jnp.float32

    xp, integer = jnp, jnp.int32

    @property
    def number(self) -> Any:  # type: ignore[override]
        """What noise is computed in."""
        return jnp.promote_types(self.dtype, jnp.float32)

    def values(self, kind: str, count: int, offset: Any = 0) -> Any:
        """Noise of mean 0 and variance 1, of the dtype, of elements from `offset` on."""
        return super().values(kind, count, offset).astype(self.dtype)

    def normals(self, words: Any) -> tuple[Any, Any]:
        """Normal numbers of the first and the second word of each pair."""
        return _normal(words[:, 0], words[:, 1], self.number)

    def blocks(self, first: Any, count: int) -> Any:
        """Blocks `first` and on, as (count, 4) words; their numbers may be beyond 32 bits."""
        low = _word(first) + jnp.arange(count, dtype=jnp.uint32)
        beyond = _word(first >> 32 if isinstance(first, int) else 0)
        high = beyond + (low < _word(first)).astype(jnp.uint32) + _word(self.purpose << 16)
        counter = jnp.broadcast_arrays(low, high, _word(self.pair), _word(self.step))
        key = [_word(self.seed), _word(self.layer) + _word(DOMAIN)]
        blocks = jax.lax.platform_dependent(list(counter), key, cpu=_looped, default=_unrolled)
        return jnp.stack(blocks, axis=-1)


def _normal(first: Any, second: Any, dtype: Any) -> tuple[Any, Any]:
    """Two standard normal numbers from two words, by Box and Muller's method.

    The angle is brought to an eighth of a turn around a whole quarter in whole numbers, exactly: near zero a cosine
    would otherwise have the error of an angle of several radians.
    """
    radius = jnp.sqrt(-2.0 * jnp.log((_cells(first).astype(dtype) + 0.5) * 2.0**-23))
    turn = _cells(second)
    quarter = (turn + (1 << 20)) >> 21
    angle = ((turn - (quarter << 21)).astype(dtype) + 0.5) * (2.0 * math.pi * 2.0**-23)
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    swapped, turned, below = quarter & 1 != 0, (quarter + 1) & 2 != 0, quarter & 2 != 0
    x, y = jnp.where(swapped, sine, cosine), jnp.where(swapped, cosine, sine)
    return radius * jnp.where(turned, -x, x), radius * jnp.where(below, -y, y)


def _cells(word: Any) -> Any:
    """The top 23 bits, in which of so many equal cells a uniform number lies, with a sign."""
    return (word >> 9).astype(jnp.int32)


def _unrolled(counter: list[Any], key: list[Any]) -> list[Any]:
    return rounds(counter, key, _multiply, _add)


def _looped(counter: list[Any], key: list[Any]) -> list[Any]:
    """The same as a loop: on a CPU, XLA would otherwise do all rounds anew for each bit that somebody reads."""

    def mix(_: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        return one_round(*state, _multiply, _add)

    words: list[Any] = jax.lax.fori_loop(0, ROUNDS, mix, (counter, key))[0]
    return words


def _add(word: Any, term: int) -> Any:
    return word + _word(term)


def _multiply(word: Any, factor: int) -> tuple[Any, Any]:
    """The upper and the lower word of a product, by halves of words: JAX has no wider numbers where it is not told."""
    low, high = _word(factor & 0xFFFF), _word(factor >> 16)
    below, above = word & _word(0xFFFF), word >> 16
    middle = above * low + (below * low >> 16)
    other = below * high + (middle & _word(0xFFFF))
    return above * high + (middle >> 16) + (other >> 16), word * _word(factor)


def _word(number: Any) -> Any:
    """Whole numbers, a Python one or an array of them, modulo 2**32."""
    return jnp.asarray(np.uint32(int(number) & WORD) if isinstance(number, int | np.integer) else number, jnp.uint32)
