"""The range of a reduction of ranges: sums in float64 in any order, minima and maxima."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rulec.compiler.view import MatrixView
from rulec.language.node import Op
from rulec.testing.interval import Array, Range

#: Level of a reduction in a kernel -> its reduced axes of `(batch, rows, cols)`.
AXES = {"row": (2,), "col": (1,), "tensor": (0, 1, 2)}


def reduced(op: Op, level: str, r: Range, view: MatrixView) -> Range:
    """The range of a reduction of one tensor's elements, `r`, in the order of its shape.

    The result has the shape `(batch, rows, 1)`, `(batch, 1, cols)`, or `(1, 1, 1)` per tensor.
    """
    low, high, nan = (view.matrices(x.reshape(view.shape)) for x in (r.low, r.high, r.nan))
    function = _sum if op is Op.SUM else _extreme(op)
    with np.errstate(all="ignore"):
        return function(Range(low, high, nan), AXES[level])


def exact(op: Op, level: str, x: Array, view: MatrixView) -> Array:
    """The reduction of one tensor's elements, in the same shape."""
    function, start = {Op.SUM: (np.add, 0.0), Op.MIN: (np.minimum, np.inf), Op.MAX: (np.maximum, -np.inf)}[op]
    with np.errstate(all="ignore"):
        whole: Array = function.reduce(
            view.matrices(x.reshape(view.shape)), axis=AXES[level], keepdims=True, initial=start
        )
    return whole


def _sum(r: Range, axes: tuple[int, ...]) -> Range:
    """The range of a sum in any order: each addition errs by at most half an ulp of the sum so far."""

    def some(which: Array) -> Array:
        return np.asarray(which.any(axis=axes, keepdims=True))

    plus, minus = some(r.high == np.inf), some(r.low == -np.inf)
    surely_plus, surely_minus = some((r.low == np.inf) & ~r.surely_nan), some((r.high == -np.inf) & ~r.surely_nan)
    empty = some(r.surely_nan) | (surely_plus & surely_minus)
    ends = [np.where(np.isfinite(x), x, 0.0) for x in (r.low, r.high)]
    size = np.maximum(np.abs(ends[0]), np.abs(ends[1])).sum(axis=axes, keepdims=True)
    count = int(np.prod([r.low.shape[axis] for axis in axes]))
    # Twice half an ulp for each addition: the bounds themselves are added up too.
    slack = count * 2.0**-52 * size
    low, high = (x.sum(axis=axes, keepdims=True) for x in ends)
    low = np.where(minus, -np.inf, np.where(surely_plus, np.inf, low - slack))
    high = np.where(plus, np.inf, np.where(surely_minus, -np.inf, high + slack))
    nan = some(r.nan) | (plus & minus)
    return Range(np.where(empty, np.inf, low), np.where(empty, -np.inf, high), np.asarray(nan | empty))


def _extreme(op: Op) -> Callable[[Range, tuple[int, ...]], Range]:
    function, start = (np.minimum, np.inf) if op is Op.MIN else (np.maximum, -np.inf)

    def apply(r: Range, axes: tuple[int, ...]) -> Range:
        low, high = (function.reduce(x, axis=axes, keepdims=True, initial=start) for x in (r.low, r.high))
        empty = r.surely_nan.any(axis=axes, keepdims=True)
        nan = np.asarray(r.nan.any(axis=axes, keepdims=True))
        return Range(np.where(empty, np.inf, low), np.where(empty, -np.inf, high), nan)

    return apply
