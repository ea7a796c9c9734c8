"""Order statistics along the last axis of arrays: elements by their rank, exactly, and quantiles between them.

Elements are compared by keys, whole numbers in the order of float32 or float64 numbers. So an element has the same bits
in every library, also a subnormal one. A short array is sorted. Of a long one the key of a rank is bisected: each round
counts the keys up to a bound, and nothing but keys and truth values is as large as the array.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

#: The functions of an array library: `rulec.array_api.functions.Functions`, which imports this module.
Functions = Any

#: The longest axis that is sorted.
SHORT = 1 << 12


def keys_of(of: Functions, x: Any) -> Any:
    """The keys of numbers: both zeros have 0, and NaN lies beyond the infinities."""
    bits = x.view(of.word(x))
    keys = bits ^ _flips(of, bits)
    return of.xp.where(keys == -1, of.xp.zeros_like(keys), keys)


def numbers_of(of: Functions, keys: Any, dtype: Any) -> Any:
    """The numbers with these keys, of float32 or float64 as the keys are."""
    return (keys ^ _flips(of, keys)).view(dtype)


def _flips(of: Functions, words: Any) -> Any:
    """The bits to invert: all but the sign of a negative word."""
    return (words >> of.like(_width(words) - 1, words)) & of.like(greatest_key(words), words)


def _width(words: Any) -> int:
    return int(words.itemsize) * 8


def greatest_key(words: Any) -> int:
    """The largest whole number of the keys' width."""
    return (1 << (_width(words) - 1)) - 1


def ranked(of: Functions, x: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """The elements of two ranks along the last axis, which stays with an extent of 1; without NaN.

    `high` is `low` or the rank after it. Ranks count from 0: one number, or an array to be broadcast.
    """
    keys = keys_of(of, x)
    find = _sorted if x.shape[-1] <= SHORT else _bisected
    return tuple(numbers_of(of, key, x.dtype) for key in find(of, keys, low, high))


def _sorted(of: Functions, keys: Any, low: Any, high: Any) -> tuple[Any, Any]:
    ordered = of.sort(keys)
    if isinstance(low, int):
        return ordered[..., low : low + 1], ordered[..., high : high + 1]
    lines = of.xp.zeros_like(ordered[..., :1])
    return of.along(ordered, low + lines), of.along(ordered, high + lines)


def _bisected(of: Functions, keys: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """The keys at the places `low` and `high` of the ascending order, which are the same or neighbours."""

    def halved(bounds: tuple[Any, Any]) -> tuple[Any, Any]:
        least, most = bounds
        middle = (least & most) + ((least ^ most) >> of.like(1, most))
        enough = of.count(keys <= middle) > low
        return of.xp.where(enough, least, middle + 1), of.xp.where(enough, middle, most)

    first = of.xp.zeros_like(keys[..., :1])
    greatest = of.like(greatest_key(keys), keys)
    key, _ = of.repeated(_width(keys), halved, (first - greatest, first + greatest))
    above = of.least(of.xp.where(keys > key, keys, greatest + of.xp.zeros_like(keys)))
    return key, of.xp.where(of.count(keys <= key) > high, key, above)


def places(of: Functions, q: Any, count: int, interpolation: str) -> tuple[Any, Any, Any, Any]:
    """The two ranks of a quantile of `count` elements, the weight of the second, and whether there is a quantile.

    The ranks and the weight are known where `q` is; else the weight is in float64.
    """
    known = q.item() if isinstance(q, np.ndarray) and q.size == 1 else q
    if isinstance(known, np.generic):
        known = known.item()
    if not hasattr(known, "shape"):
        inside = bool(0 <= known <= 1)
        position = (known if inside else 0) * (count - 1)
        low = int(position)
        weight = position - low
        return (*_ends(interpolation, low, low + (weight > 0), low + _rounds_up(low, weight), weight), inside)
    q = of.cast(known, "float64")
    inside = (q >= 0) & (q <= 1)
    position = of.filled(inside, q, 0.0) * (count - 1)
    floor = of.xp.floor(position)
    lower, upper, nearest = (of.cast(x, "int64") for x in (floor, of.xp.ceil(position), of.xp.round(position)))
    low, high, weight = _ends(interpolation, lower, upper, nearest, position - floor)
    return low, high, weight, inside


def _rounds_up(low: int, weight: Any) -> bool:
    """Whether the nearest rank is the one after `low`; of two equally near it is the even one."""
    return bool(weight > 0.5 or (weight == 0.5 and low % 2))


def _ends(interpolation: str, floor: Any, ceiling: Any, nearest: Any, weight: Any) -> tuple[Any, Any, Any]:
    """The ranks below and above a place, and the weight of the upper one, by a way of interpolation."""
    if interpolation in ("lower", "higher", "nearest"):
        rank = {"lower": floor, "higher": ceiling, "nearest": nearest}[interpolation]
        return rank, rank, 0.5
    return floor, ceiling, 0.5 if interpolation == "midpoint" else weight


def between(of: Functions, a: Any, b: Any, weight: Any) -> Any:
    """`a + weight*(b - a)`, from the nearer end, as NumPy and torch compute it; weighted ends where that overflows."""
    rest, is_lower = 1 - weight, weight < 0.5
    with np.errstate(all="ignore"):
        distance = b - a
        if hasattr(weight, "shape"):
            weight, rest = of.cast(weight, a.dtype), of.cast(rest, a.dtype)
            near = of.xp.where(is_lower, a + distance * weight, b - distance * rest)
        else:
            near = a + distance * weight if is_lower else b - distance * rest
        far = a * rest + b * weight
    return of.xp.where(a == b, a, of.xp.where(of.is_finite(distance), near, far))


def lines_of(of: Functions, x: Any, per: str) -> Any:
    """Matrices `(batch, rows, cols)` with the elements of a level along the last axis."""
    if per in ("row", "col"):
        return x if per == "row" else of.transposed(x)
    batch, rows, cols = x.shape
    return x.reshape((1, 1, batch * rows * cols) if per == "tensor" else (batch, 1, rows * cols))


def quantile(of: Functions, x: Any, q: Any, per: str = "tensor", interpolation: str = "linear") -> Any:
    """The quantile `q` of matrices `(batch, rows, cols)`, one left per level with an extent of 1 for other axes.

    NaN where an element is NaN, where there is none, and where `q` is not from 0 to 1. `q` is a number or an array
    `(batch, 1, 1)`. A zero has no sign.
    """
    lines = lines_of(of, x, per)
    if not lines.shape[-1]:
        # MLX reads memory that is not its own where it reduces one axis without elements; a sum of all is right.
        result = of.xp.broadcast_to(of.xp.sum(lines) + math.nan, (*lines.shape[:-1], 1))
    else:
        low, high, weight, inside = places(of, q, lines.shape[-1], interpolation)
        below, above = of.ranked(lines, low, high)
        result = between(of, below, above, weight)
        whole = ~of.xp.any(lines != lines, axis=-1, keepdims=True)
        result = of.filled(whole & inside, result, math.nan)
    return of.transposed(result) if per == "col" else result
