"""Operations on the bits of float32 numbers, for weights in two parts: see `rulec.compiler.weights`.

Each takes the array library `xp` and its arrays. Operands of other dtypes are rounded to float32, and results are
float32.
"""

from __future__ import annotations

from typing import Any


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
