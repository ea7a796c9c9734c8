"""Functions of one array for the code of the mlx backend: mx lacks them or computes them badly.

On the CPU, `exp` and `sigmoid` of mx are good to seven digits, also in float64, and infinite near the largest number.
`expm1` is good to the last digit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any


def wide() -> Any:
    """The dtype of reductions: float64 on the CPU, and float32 on a GPU, as it has no wider one."""
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

    small = exp(-mx.abs(x))
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
    """-1, 0 or 1; NaN and zeros stay the same."""
    import mlx.core as mx

    return mx.where((x > 0) | (x < 0), mx.sign(x), x)


def _reduced(function: str, nothing: float, x: Any, axes: Any = None) -> Any:
    """A reduction of all elements, or along axes kept with size 1; `nothing` is the result of no elements."""
    import mlx.core as mx

    if x.size == 0:
        kept = () if axes is None else tuple(1 if i in axes else size for i, size in enumerate(x.shape))
        return mx.full(kept, nothing, wide())
    return getattr(mx, function)(x.astype(wide()), axis=axes, keepdims=axes is not None)


total = functools.partial(_reduced, "sum", 0.0)
least = functools.partial(_reduced, "min", math.inf)
greatest = functools.partial(_reduced, "max", -math.inf)


def hypot(a: Any, b: Any) -> Any:
    """sqrt(a*a + b*b) without overflow and underflow; infinite where either is, even beside NaN."""
    import mlx.core as mx

    a, b = mx.abs(a), mx.abs(b)
    large, small = mx.maximum(a, b), mx.minimum(a, b)
    ratio = mx.where(large > 0, small / large, mx.zeros_like(large))
    result = large * mx.sqrt(ratio * ratio + 1.0)
    return mx.where((a == math.inf) | (b == math.inf), mx.full(result.shape, math.inf, result.dtype), result)


#: Formulas in place of functions that mx lacks, by the language's names.
FORMULAS: Mapping[str, Callable[..., Any]] = {"hypot": hypot}
