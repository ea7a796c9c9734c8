"""Operations on the bits of float32 numbers, for values in fewer bits: see `rulec.compiler.weights`.

Each takes the array library `xp` and its arrays. Operands of other dtypes are rounded to float32, and results are
float32.

The random bits of an element come from a counter, the element's place in its tensor. The counter is mixed with two keys
of the seed, the tensor, the draw and the step. The mixing function is `lowbias32` (Chris Wellons, hash-prospector,
2018): each bit of the counter changes each bit of the result with a probability within 0.2 % of one half. The upper 16
bits of the result are taken, which its last shift leaves as they are.
"""

from __future__ import annotations

import math
from typing import Any

from rulec.array_api.slices import Piece

#: The largest number of a tensor that is told from others: a float32 has 24 bits.
NUMBERS = 1 << 24

#: The shifts and factors of the mixing function.
MIXING = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))
#: The distance of neighbouring places as counters, near 2**32 divided by the golden ratio, and that of each 2**32nd.
GOLDEN, SILVER = 0x9E3779B9, 0x6A09E667


def _cast(x: Any, dtype: Any) -> Any:
    return x.to(dtype) if hasattr(x, "to") else x.astype(dtype)


def _bits(xp: Any, x: Any) -> Any:
    return _cast(x, xp.float32).view(xp.int32)


def away(xp: Any, x: Any, count: Any) -> Any:
    """`x` moved away from zero by a count of ulps, or towards zero by a negative one."""
    return (_bits(xp, x) + _cast(count, xp.int32)).view(xp.float32)


def ulps(xp: Any, x: Any, y: Any) -> Any:
    """The ulps from `y` away from zero to `x`, of one sign; 0 where `x` is NaN."""
    count = _cast(_bits(xp, x) - _bits(xp, y), xp.float32)
    return xp.where(x == x, count, xp.zeros_like(count))


def coarse(xp: Any, x: Any, count: Any) -> Any:
    """`x` moved away from zero by a count of ulps, its lowest 16 bits cleared; `x` where it is not finite."""
    moved = (_bits(xp, x) + _cast(count, xp.int32)) & -0x10000
    return xp.where(xp.isfinite(x), moved.view(xp.float32), _cast(x, xp.float32))


def words_of(seed: int, number: Any, piece: Piece | None = None) -> dict[str, Any]:
    """The facts of a tensor, or of a part of one, that its random bits follow from: see `WORDS` of nodes."""
    words = {"seed_low": seed % (1 << 16), "seed_high": seed >> 16, "number": number % NUMBERS}
    return words if piece is None else words | piece.words


def scrambled(xp: Any, x: Any) -> Any:
    """The mixing function of a word: its lower 32 bits in uint32 or int64, in an array of the same dtype."""
    x = _lower(xp, x)
    for shift, factor in MIXING:
        x = x ^ (x >> _like(xp, shift, x))
        x = x if factor == 1 else _lower(xp, x * _like(xp, factor, x))
    return x


def chance_at(xp: Any, low: Any, high: Any, words: tuple[Any, ...]) -> Any:
    """The random number below 2**16 of the element at a place: the lower and the upper 32 bits of it, as words."""
    seed_low, seed_high, number, step, draw = (_cast(_array(xp, word), low.dtype) for word in words)
    shifted, golden = (_like(xp, factor, low) for factor in (1 << 16, GOLDEN))
    stream = scrambled(xp, number + draw * _like(xp, NUMBERS, low)) ^ (seed_low + seed_high * shifted)
    stream = scrambled(xp, stream)
    first, second = scrambled(xp, stream ^ step), scrambled(xp, stream * golden + step)
    counter = _lower(xp, low * golden + (first + high * _like(xp, SILVER, low)))
    for (shift, factor), key in zip(MIXING[:2], (second, _like(xp, 0, low)), strict=True):
        mixed = (counter ^ (counter >> _like(xp, shift, low))) * _like(xp, factor, low)
        counter = _lower(xp, mixed + key)
    return _cast(counter >> _like(xp, MIXING[2][0], low), xp.float32)


def chance(xp: Any, like: Any, *words: Any, turned: bool = False, word: Any = None) -> Any:
    """The random numbers below 2**16 of all elements of a tensor, of the shape of `like`.

    `words` are the five of `chance_at`, and for a part of a tensor those of its piece. `turned` says that the last two
    axes lie in memory in the other order. `word` is the dtype of words: uint32, or int64 for a library that does not
    compute in it.
    """
    word = xp.uint32 if word is None else word
    shape = tuple(like.shape[:-2] + like.shape[:-3:-1] if turned else like.shape)
    low, piece = _places(xp, shape, word), words[5:]
    high = _like(xp, 0, low)
    if piece or math.prod(shape) > 1 << 32:
        places = in_piece(xp, _places(xp, shape, xp.int64), *piece)
        low, high = (_cast(places & 0xFFFFFFFF, word) if piece else low), _cast(places >> 32, word)
    numbers = chance_at(xp, low, high, words[:5])
    return xp.permute_dims(numbers, (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)) if turned else numbers


def in_piece(xp: Any, places: Any, *piece: Any) -> Any:
    """The places in the whole tensor, of int64, of elements at places of a part of it.

    `piece` are the words of `RANGE` or `ROWS` in `rulec.language.expr.node`, or none: the part is the whole.
    """
    words = [_cast(_array(xp, word), xp.int64) for word in piece]
    numbers = [low + (high << 24) for low, high in zip(words[::2], words[1::2], strict=True)]
    if len(numbers) < 2:
        return sum(numbers, places)
    start, width, gap = numbers
    return places + start + places // width * gap


def _array(xp: Any, word: Any) -> Any:
    """A number as an array; torch's stay where they are."""
    return word if hasattr(word, "to") else xp.asarray(word)


def _like(xp: Any, number: int, x: Any) -> Any:
    """A number for arithmetic with words; for torch's, of any device, it stays Python's."""
    return number if hasattr(x, "to") else xp.asarray(number, dtype=x.dtype)


def _lower(xp: Any, x: Any) -> Any:
    """The lower 32 bits of words."""
    return x if x.dtype == xp.uint32 else x & 0xFFFFFFFF


def _places(xp: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The places of elements in the order of memory, axis by axis; in 32 bits the lower ones."""
    total = xp.zeros((), dtype=dtype)
    for axis, size in enumerate(shape):
        along, after = xp.arange(size, dtype=dtype), shape[axis + 1 :]
        stride = math.prod(after) % (1 << 32) if dtype == xp.uint32 else math.prod(after)
        places = along * xp.asarray(stride, dtype=dtype)
        total = total + xp.reshape(places, (size, *(1 for _ in after)))
    return total
