"""What CuPy arrays differ in from NumPy's: operations, and matrix functions on stacks `(batch, rows, cols)`.

Numbers known here are NumPy's or Python's: CuPy passes them to kernels as arguments, and they take the dtype of the
arrays they meet; so do numbers on the device.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from rulec.arrays import arithmetic as operations
from rulec.arrays.arithmetic import Table
from rulec.arrays.functions import Functions
from rulec.arrays.matrix import matrix_functions
from rulec.language.arithmetic import NUMPY
from rulec.language.node import Op


class CupyFunctions(Functions):
    """CuPy's."""

    def fitted(self, x: Any, dtype: Any) -> Any:
        """A number on the device in that dtype, where there is one; a number known here as Python's."""
        if isinstance(x, np.generic):
            return x.item()
        number = dtype is not None and getattr(x, "ndim", 1) == 0 and x.dtype.kind == "f"
        return x.astype(dtype, copy=False) if number else x

    def beside(self, number: Any, x: Any) -> Any:
        """As it is."""
        return number


@functools.cache
def functions() -> Functions:
    import cupy

    return CupyFunctions(cupy)


@functools.cache
def arithmetic() -> Table:
    """The elementwise operations."""
    erf = importlib.import_module("cupyx.scipy.special").erf
    plain = operations.arithmetic(functions(), remainder=_remainder, erf=erf)
    return {op: _on_device(op, function) for op, function in plain.items()}


def _on_device(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    """The operation on the device, or here where all operands are known here."""
    import cupy

    met = operations.meeting(functions(), function)

    def apply(*operands: Any) -> Any:
        there = any(isinstance(x, cupy.ndarray) for x in operands)
        return met(*operands) if there else NUMPY[op](*operands)

    return apply


def _remainder(a: Any, b: Any) -> Any:
    """What is left of a division rounded down, without rounding, with the sign of `b`."""
    import cupy as cp

    rest = cp.fmod(a, b)
    turned = cp.where((rest < 0) != (b < 0), rest + b, rest)
    return cp.where(rest == 0, cp.copysign(rest, b), turned)


@functools.cache
def matrix() -> Table:
    """The matrix functions."""
    return matrix_functions(functions())
