"""The least that the array API standard asks of a library, around NumPy: its functions, and nothing that NumPy adds.

Arrays of this library mix with Python's numbers under operators, with arrays of their own dtype, and with nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

float32, float64 = np.float32, np.float64
slow_erf = np.vectorize(math.erf, otypes=[np.float64])


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: Array, other: Any) -> Any:
        if isinstance(other, Array):
            if other.dtype != self.dtype:
                raise TypeError(f"{self.dtype} and {other.dtype} do not mix")
            other = other.values
        elif not isinstance(other, int | float):
            return NotImplemented
        return Array(np.asarray(getattr(self.values, name)(other)))

    return apply


class Array:
    """An array with the standard's operators."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values
        self.dtype, self.shape = values.dtype, values.shape

    def __array_namespace__(self) -> Any:
        import sys

        return sys.modules[__name__]

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise TypeError("no conversion to NumPy")

    def __setitem__(self, key: Any, value: Any) -> None:
        self.values[key] = value.values if isinstance(value, Array) else value

    def __getitem__(self, key: Any) -> Array:
        return Array(np.asarray(self.values[key]))

    def __neg__(self) -> Array:
        return Array(np.asarray(-self.values))

    def __invert__(self) -> Array:
        assert self.dtype == bool
        return Array(np.asarray(~self.values))

    def __float__(self) -> float:
        assert self.shape == (), "only one number is a number"
        return float(self.values)

    __hash__ = None  # type: ignore[assignment]


_BINARY = ("add", "sub", "mul", "truediv", "radd", "rsub", "rmul", "rtruediv", "lt", "le", "gt", "ge", "eq", "ne")
for _name in (*_BINARY, "and", "or", "rand", "ror"):
    setattr(Array, f"__{_name}__", _operator(f"__{_name}__"))


def wrapped(function: Callable[..., Any]) -> Callable[..., Array]:
    """A function of NumPy arrays as one of this library's."""

    def call(*arrays: Array) -> Array:
        assert all(isinstance(a, Array) for a in arrays), "functions take arrays, not numbers"
        given = [a.values for a in arrays]
        result = np.asarray(function(*given))
        floats = [a.dtype for a in given if a.dtype.kind == "f"]
        return Array(result.astype(floats[0]) if floats and result.dtype.kind == "f" else result)

    return call


def asarray(value: Any, dtype: Any = None, copy: bool | None = None) -> Array:
    """An array of a number or an array."""
    given = value.values if isinstance(value, Array) else value
    return Array(np.array(given, dtype) if copy else np.asarray(given, dtype))


def zeros(shape: tuple[int, ...]) -> Array:
    """Zeros in the default dtype."""
    return Array(np.zeros(shape))


def full(shape: tuple[int, ...], value: float, *, dtype: Any = None) -> Array:
    """An array of one number."""
    return Array(np.full(shape, value, dtype))


def reshape(x: Array, shape: tuple[int, ...], *, copy: bool | None = None) -> Array:
    """The same elements in another shape: a copy wherever that is allowed, as it is to a library."""
    values = x.values.reshape(shape)
    if copy is None:
        values = values.copy()
    assert copy is not False or np.shares_memory(values, x.values) or not values.size
    return Array(values)


def permute_dims(x: Array, axes: tuple[int, ...]) -> Array:
    """The same memory with its dimensions in another order."""
    return Array(x.values.transpose(axes))


def sum(x: Array, *, axis: int | None = None, dtype: Any = None, keepdims: bool = False) -> Array:
    """A sum of numbers, in the dtype asked for."""
    assert x.dtype.kind == "f"
    return Array(np.asarray(np.sum(x.values, axis=axis, dtype=dtype, keepdims=keepdims)))


def min(x: Array, *, axis: int | None = None, keepdims: bool = False) -> Array:
    """The least number, of some."""
    return Array(np.asarray(np.min(x.values, axis=axis, keepdims=keepdims)))


def max(x: Array, *, axis: int | None = None, keepdims: bool = False) -> Array:
    """The greatest number, of some."""
    return Array(np.asarray(np.max(x.values, axis=axis, keepdims=keepdims)))


sqrt, abs, sign, exp, log, tanh, floor = map(wrapped, (np.sqrt, np.abs, np.sign, np.exp, np.log, np.tanh, np.floor))
sin, cos, log1p, expm1, hypot = map(wrapped, (np.sin, np.cos, np.log1p, np.expm1, np.hypot))
isfinite, minimum, maximum, where = map(wrapped, (np.isfinite, np.minimum, np.maximum, np.where))
remainder, ones_like = map(wrapped, (np.remainder, np.ones_like))


def _pow(x: Any, y: Any) -> Any:
    """Powers without NumPy's shortcut for one exponent of 0.5, which the standard does not allow."""
    return np.power(x, y if np.ndim(y) else np.full(np.shape(x), y))


pow = wrapped(_pow)
