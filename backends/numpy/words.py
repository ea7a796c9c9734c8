"""Functions of one array for the code of the numpy backend, as the array API standard lacks them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rulec.errors import TensorError
from rulec.language.expr.arithmetic import NUMPY
from rulec.language.expr.node import Op

_ERF = np.vectorize(math.erf, otypes=[np.float64])


def _namespace(x: Any) -> Any:
    return x.__array_namespace__() if hasattr(x, "__array_namespace__") else np


def _by_library(x: Any, function: str) -> Any:
    namespace = _namespace(x)
    implementation = getattr(namespace, function, None)
    if implementation is None:
        raise TensorError(f"arrays of {namespace.__name__} have no {function}: use NumPy arrays, or another backend")
    return implementation(x)


def cbrt(x: Any) -> Any:
    """The cube root, with the sign of `x`. TensorError where the array's library has none."""
    return _by_library(x, "cbrt")


def erf(x: Any) -> Any:
    """The error function, in the dtype of `x`. TensorError where the array's library has none; NumPy's is slow."""
    return _ERF(x).astype(x.dtype) if _namespace(x) is np else _by_library(x, "erf")


def power(x: Any, y: Any) -> Any:
    """C99's pow. For a single exponent of 0.5, NumPy's power is the square root, with other results at -0 and -inf."""
    namespace = _namespace(x)
    return NUMPY[Op.POW](x, y) if namespace is np else namespace.pow(x, y)


def sigmoid(x: Any) -> Any:
    """1/(1 + exp(-x)) without overflow: the argument of exp is never positive."""
    namespace = _namespace(x)
    small = namespace.exp(-namespace.abs(x))
    return namespace.where(x < 0, small, namespace.ones_like(x)) / (1.0 + small)


def least(x: Any, axis: int | None = None) -> Any:
    """The least element as float64, or the least along an axis, kept with size 1. Infinity of no elements."""
    return _extreme(x, axis, "min", math.inf)


def greatest(x: Any, axis: int | None = None) -> Any:
    """The greatest element as float64, or the greatest along an axis, kept with size 1. -Infinity of no elements."""
    return _extreme(x, axis, "max", -math.inf)


def _extreme(x: Any, axis: int | None, function: str, none: float) -> Any:
    namespace = _namespace(x)
    kept = () if axis is None else tuple(1 if i == axis else size for i, size in enumerate(x.shape))
    if 0 in x.shape:
        # The standard does not define the extreme of no elements.
        return namespace.full(kept, none, dtype=namespace.float64)
    extreme = getattr(namespace, function)(x, axis=axis, keepdims=axis is not None)
    return namespace.asarray(extreme, dtype=namespace.float64)
