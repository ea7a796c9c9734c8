"""Units in the last place: the distance between neighbouring numbers of a dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

#: The distance from 1 to the next number, by dtype.
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_SMALLEST_NORMAL = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-14, "bfloat16": 2.0**-126}


def ulp(magnitude: Array, dtype: str) -> Array:
    """The distance between neighbouring numbers of `dtype` at these magnitudes, in float64."""
    floor = np.maximum(np.where(np.isfinite(magnitude), magnitude, 0.0), _SMALLEST_NORMAL[dtype])
    _, exponent = np.frexp(floor)
    return np.asarray(np.ldexp(EPS[dtype], exponent - 1))


def largest_ulps(values: Array, expected: Array, dtype: str) -> float:
    """The largest distance, in ulps of the expected values; infinite where one side alone is not finite."""
    a, b = np.asarray(values, np.float64), np.asarray(expected, np.float64)
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        apart = np.abs(a - b) / ulp(np.abs(b), dtype)
    return float(np.max(np.where(same, 0.0, np.where(np.isfinite(apart), apart, np.inf)), initial=0.0))
