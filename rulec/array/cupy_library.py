"""What CuPy arrays are worked on with between the stages: CuPy itself, on the current device."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from rulec.array.arrays import numpy_dtype
from rulec.array_api import functions as operations
from rulec.array_api.functions import Functions, Table
from rulec.array_api.library import Library
from rulec.array_api.matrix import matrix_functions
from rulec.language.expr.arithmetic import NUMPY
from rulec.language.expr.node import Op


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


class CupyLibrary(Library):
    """CuPy on the current device. Nothing waits for the device, but for CuPy's own decompositions.

    Numbers known here are NumPy's.
    """

    def __init__(self) -> None:
        self.of, self.arithmetic, self.matrix = functions(), arithmetic(), matrix()
        self._held: dict[int, Any] = {}

    def hold(self, thing: Any) -> None:
        import cupy

        if cupy.cuda.get_current_stream().is_capturing():
            self._held[id(thing)] = thing

    def numbers(self, values: Any) -> Any:
        """A copy on the device, which CuPy makes by way of pinned memory; a CuPy array as it is."""
        import cupy

        return values if isinstance(values, cupy.ndarray) else cupy.asarray(np.asarray(values))

    def write(self, array: Any, values: Any) -> None:
        array[...] = self.numbers(values).reshape(array.shape).astype(array.dtype, copy=False)

    def handed(self, values: Any, dtype: str, copied: bool) -> Any:
        """The same array where it will do."""
        import cupy

        array = cupy.ascontiguousarray(self.numbers(values), dtype=np.dtype(dtype))
        return array.copy() if copied and array.data.ptr == values.data.ptr else array

    def cast(self, values: Any, dtype: str) -> Any:
        return values.astype(numpy_dtype(dtype), copy=False)

    def copy(self, values: Any) -> Any:
        return values.copy()

    def spread(self, values: Any, shape: tuple[int, ...]) -> Any:
        """A view; of a number known here, filled memory on the device."""
        import cupy

        if isinstance(values, cupy.ndarray):
            return cupy.broadcast_to(values, shape)
        return cupy.full(shape, values.item(), values.dtype)

    def take(self, values: Any, places: np.ndarray[Any, Any]) -> Any:
        return values[self.numbers(np.asarray(places, np.int64))]

    def put(self, into: Any, places: np.ndarray[Any, Any] | slice, values: Any) -> None:
        numbers = self.numbers(values).astype(into.dtype, copy=False)
        into[places if isinstance(places, slice) else self.numbers(np.asarray(places, np.int64))] = numbers
