"""The random streams of perturbations in JAX, in words of 32 bits alone: `rulec.es.streams` says what they are.

Seed, layer, direction and step may be traced, and mapped over by vmap; how many elements there are and their kind may
not. Where they begin may be traced if that is at the first element of a block.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rulec.arrays.random import ROUNDS, WORD, one_round, rounds
from rulec.es.streams import DOMAIN, ELEMENTS, NOISE, SCALE


def words(seed: Any, layer: Any, purpose: int, pair: Any, step: Any, count: int, offset: Any = 0) -> Any:
    """One word for each of `count` elements from `offset` on: uint32[count]."""
    return _elements("raw", count, offset, key=_key(seed, layer), place=(purpose, _word(pair), _word(step)))


def whole(
    kind: str, shape: tuple[int, ...], *, seed: Any, layer: Any, step: Any, pair: Any, purpose: int = NOISE,
    offset: Any = 0,
) -> Any:  # fmt: skip
    """The whole numbers of rademacher (1, -1) or popcount (-4 to 4) noise: an int32 array of a shape, in row-major
    order from element `offset` on."""
    place = (purpose, _word(pair), _word(step))
    parts = _elements(kind, math.prod(shape), offset, key=_key(seed, layer), place=place).reshape(shape)
    return 1 - 2 * parts.astype(jnp.int32) if kind == "rademacher" else jnp.bitwise_count(parts).astype(jnp.int32) - 4


def values(
    kind: str, shape: tuple[int, ...], *, seed: Any, layer: Any, step: Any, pair: Any, purpose: int = NOISE,
    dtype: Any = jnp.float32, offset: Any = 0,
) -> Any:  # fmt: skip
    """Noise of mean 0 and variance 1: an array of a shape and dtype, in row-major order from element `offset` on."""
    stream = {"seed": seed, "layer": layer, "step": step, "pair": pair, "purpose": purpose}
    wide = jnp.promote_types(dtype, jnp.float32)
    if kind != "normal":
        return (whole(kind, shape, **stream, offset=offset).astype(wide) * SCALE[kind]).astype(dtype)
    count, (pairs, before) = math.prod(shape), _begin(offset, 2)
    pairs_of_words = words(seed, layer, purpose, pair, step, count + before + 1 & ~1, 2 * pairs).reshape(-1, 2)
    both = jnp.stack(_normal(pairs_of_words[:, 0], pairs_of_words[:, 1], wide), axis=-1).reshape(-1)
    return both[before:][:count].reshape(shape).astype(dtype)


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


def _begin(offset: Any, each: int) -> tuple[Any, int]:
    """The part, of `each` elements, that an offset lies in, and how many of its elements come before: traced, none."""
    return divmod(offset, each) if isinstance(offset, int) else (offset // each, 0)


def _elements(kind: str, count: int, offset: Any, *, key: Any, place: Any) -> Any:
    """The word, byte or bit of each element: a flat array of words."""
    each = ELEMENTS[kind]
    first, before = _begin(offset, each)
    parts = _blocks(first, -(-(before + count) // each), key, place)
    if each > 4:
        size = 32 // (each // 4)
        shifts = jnp.arange(0, 32, size, dtype=jnp.uint32)
        parts = (parts[..., None] >> shifts) & jnp.uint32((1 << size) - 1)
    return parts.reshape(-1)[before:][:count]


def _blocks(first: Any, count: int, key: Any, place: Any) -> Any:
    """Blocks `first` and on, as (count, 4) words; their numbers may be beyond 32 bits."""
    purpose, pair, step = place
    low = _word(first) + jnp.arange(count, dtype=jnp.uint32)
    beyond = _word(first >> 32 if isinstance(first, int) else 0)
    high = beyond + (low < _word(first)).astype(jnp.uint32) + _word(purpose << 16)
    counter = jnp.broadcast_arrays(low, high, pair, step)
    blocks = jax.lax.platform_dependent(list(counter), list(key), cpu=_looped, default=_unrolled)
    return jnp.stack(blocks, axis=-1)


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


def _key(seed: Any, layer: Any) -> tuple[Any, Any]:
    return _word(seed), _word(layer) + _word(DOMAIN)


def _word(number: Any) -> Any:
    """Whole numbers, a Python one or an array of them, modulo 2**32."""
    return jnp.asarray(np.uint32(int(number) & WORD) if isinstance(number, int | np.integer) else number, jnp.uint32)
