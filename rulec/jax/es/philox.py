"""The random streams of perturbations in JAX, in words of 32 bits alone: `rulec.es.streams` says what they are.

Seed, layer, direction and step may be traced, and mapped over by vmap; how many elements there are and their kind may
not. Where they begin may be traced if that is at the first element of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rulec.array_api.random import ROUNDS, WORD, one_round, rounds
from rulec.es.streams import DOMAIN, Stream


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
        """Of the words' first and second."""
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
