"""Functions of one array that mx lacks or computes badly, for the code that the mlx backend prints.

On the CPU mx's own `exp` and `sigmoid` are good to seven digits, in float64 too, and take what is nearly the largest
number for infinite; `expm1` is good to the last.
"""

from __future__ import annotations

import math
from typing import Any


def wide() -> Any:
    """The dtype of reductions: float64 on the CPU, and float32 on a GPU, which has no wider one."""
    import mlx.core as mx

    return mx.float64 if mx.default_device().type == mx.DeviceType.cpu else mx.float32


def exp(x: Any) -> Any:
    """The exponential: 1/exp(-x) where `x` is negative."""
    import mlx.core as mx

    grown = mx.expm1(mx.abs(x)) + 1.0
    return mx.where(x < 0, 1.0 / grown, grown)


def sigmoid(x: Any) -> Any:
    """1/(1 + exp(-x)) without overflow."""
    import mlx.core as mx

    grown = mx.expm1(mx.abs(x)) + 1.0
    small = 1.0 / grown
    return mx.where(x < 0, small, mx.ones_like(x)) / (1.0 + small)


def cbrt(x: Any) -> Any:
    """The cube root, with the sign of `x`: a power, and one step of Newton's towards the root."""
    import mlx.core as mx

    size = mx.abs(x)
    root = mx.power(size, mx.array(1 / 3, x.dtype))
    better = root - (root - size / (root * root)) / 3.0
    good = mx.isfinite(better) & (root > 0)
    return mx.where(x < 0, -1.0, 1.0).astype(x.dtype) * mx.where(good, better, root)


def sign(x: Any) -> Any:
    """-1, 0 or 1; NaN and zeros stay what they are."""
    import mlx.core as mx

    return mx.where((x > 0) | (x < 0), mx.sign(x), x)


def power(x: Any, y: Any) -> Any:
    """C99's pow."""
    import mlx.core as mx

    return mx.power(x, y)


def mod(x: Any, y: Any) -> Any:
    """The remainder, with the sign of `y`."""
    import mlx.core as mx

    return mx.remainder(x, y)


def total(x: Any, axes: Any = None) -> Any:
    """The sum of all elements, or along axes that stay with an extent of 1."""
    import mlx.core as mx

    return mx.sum(x.astype(wide()), axis=axes, keepdims=axes is not None)


def least(x: Any, axes: Any = None) -> Any:
    """The least element, or along axes that stay with an extent of 1: infinity where there is none."""
    return _extreme(x, axes, "min", math.inf)


def greatest(x: Any, axes: Any = None) -> Any:
    """The greatest element, or along axes that stay with an extent of 1: -infinity where there is none."""
    return _extreme(x, axes, "max", -math.inf)


def _extreme(x: Any, axes: Any, function: str, nothing: float) -> Any:
    import mlx.core as mx

    kept = () if axes is None else tuple(1 if i in axes else size for i, size in enumerate(x.shape))
    if x.size == 0:
        return mx.full(kept, nothing, wide())
    return getattr(mx, function)(x.astype(wide()), axis=axes, keepdims=axes is not None)
