"""The order of elements: sorted values, the places of elements in order, and elements at places.

The order is one in every library, from the least to NaN, and stable: of equal elements the first comes first, zeros of
both signs are equal, and so is every NaN to every other. Places are numbers of arithmetic, from 0. They count along
each row, along each column, or in a matrix or a whole tensor in the order of its rows.
"""

from __future__ import annotations

import math
from typing import Any

from rulec.array_api.selection import greatest_key, keys_of, lines_of
from rulec.errors import TensorError

#: The functions of an array library: `rulec.array_api.functions.Functions`, which imports this module.
Functions = Any

#: float32 has every whole number up to this.
MOST_PLACES = 1 << 24


def in_order(of: Functions, x: Any) -> Any:
    """The places of elements along the last axis in ascending order, as whole numbers."""
    keys = keys_of(of, x)
    return of.order(of.xp.where(x == x, keys, of.like(greatest_key(keys), keys)))


def sort(of: Functions, x: Any, per: str = "tensor") -> Any:
    """The elements of matrices `(batch, rows, cols)` in ascending order, with their bits, within each level."""
    lines = lines_of(of, x, per)
    return _of_lines(of, of.along(lines, of.in_order(lines)), x.shape, per)


def argsort(of: Functions, x: Any, per: str = "tensor") -> Any:
    """The places of the elements in ascending order, within each level; TensorError where there are too many."""
    lines = lines_of(of, x, per)
    count = lines.shape[-1]
    if count > MOST_PLACES and getattr(x.dtype, "itemsize", 8) < 8:
        raise TensorError(
            f"argsort counts {count} places in float32, which has all whole numbers up to {MOST_PLACES}: order rows or "
            "columns, or keep the parameter in float64"
        )
    return _of_lines(of, of.cast(of.in_order(lines), x.dtype), x.shape, per)


def take(of: Functions, x: Any, places: Any, per: str = "tensor") -> Any:
    """The elements at places within each level; NaN where a place is none of the whole numbers below the extent.

    Rows and columns of `x` and of `places` meet as in arithmetic where the level leaves them apart. `places` is an
    array, or one number for all.
    """
    lines = lines_of(of, x, per)
    if getattr(places, "ndim", 0):
        wanted, (first, *sides) = lines_of(of, places, per), places.shape
    else:
        wanted = of.cast(of.xp.zeros_like(of.count(lines == lines)), "float64") + places
        first, *sides = len(wanted), 1, 1
    outer = [max(a, b) if a * b else 0 for a, b in zip(lines.shape[:2], wanted.shape[:2], strict=True)]
    lines, wanted = (of.xp.broadcast_to(each, (*outer, each.shape[-1])) for each in (lines, wanted))
    elements = _taken(of, lines, wanted)
    return _of_lines(of, elements, (outer[0] if per == "matrix" else first, *sides), per)


def _taken(of: Functions, lines: Any, places: Any) -> Any:
    inside = (places >= 0) & (places < lines.shape[-1])
    whole = of.cast(of.filled(inside, places, 0.0), "int64")
    inside = inside & (whole == places)
    if not lines.shape[-1]:
        return of.cast(of.filled(inside, places, math.nan), lines.dtype)
    return of.filled(inside, of.along(lines, whole), math.nan)


def _of_lines(of: Functions, lines: Any, shape: tuple[int, ...], per: str) -> Any:
    """Matrices of this shape from their lines: the inverse of `lines_of`."""
    return {"row": lines, "col": of.transposed(lines)}[per] if per in ("row", "col") else lines.reshape(shape)


def topk(of: Functions, x: Any, k: Any) -> Any:
    """1 for the `k` largest values of vectors `(batch, n, 1)` or `(batch, 1, n)`, 0 for the others; NaN for NaN."""
    lines = of.transposed(x) if x.shape[-1] == 1 else x
    rank = of.cast(of.order(of.in_order(-lines)), x.dtype)
    chosen = of.filled(rank < of.beside(k, x), of.xp.ones_like(lines), 0)
    marks = of.filled(lines == lines, chosen, math.nan)
    return of.transposed(marks) if x.shape[-1] == 1 else marks
