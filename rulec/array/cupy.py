"""CuPy arrays as the runtime sees them, and CuPy as the array library between the stages, on the current device."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from rulec.array.arrays import NumpyArrays, numpy_dtype
from rulec.array_api import functions as operations
from rulec.array_api.functions import Functions, Table
from rulec.array_api.library import Library
from rulec.array_api.matrix import matrix_functions
from rulec.array_api.numpy import NumpyLibrary
from rulec.errors import TensorError
from rulec.language.expr.arithmetic import NUMPY
from rulec.language.expr.node import Op
from rulec.runtime.arrays import Vector
from rulec.runtime.storage.allocator import StateSpec


class CupyArrays(NumpyArrays):
    """CuPy arrays on one GPU, of NumPy's dtypes and bfloat16, contiguous in C or Fortran order."""

    kind, module = "CuPy array", "cupy"

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    @contextmanager
    def here(self) -> Iterator[None]:
        """Makes the GPU the current one."""
        import cupy

        with cupy.cuda.Device(self.number):
            yield

    def is_one(self, array: Any) -> bool:
        """Whether it is a CuPy array on this GPU."""
        import cupy

        if not isinstance(array, cupy.ndarray):
            return False
        if array.device.id != self.number:
            raise TensorError(
                f"a gradient or input is on GPU {array.device.id}, its parameter on GPU {self.number}: move it there"
            )
        return True

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def copied(self, array: Any) -> np.ndarray[Any, Any]:
        """A copy in main memory. Waits for the device."""
        return np.array(array.get() if hasattr(array, "get") else array)

    def fill(self, array: Any, values: Any) -> None:
        """Gives an array the values of one of NumPy's."""
        if isinstance(array, np.ndarray) and not hasattr(array, "get"):
            array[...] = values
        else:
            array[...] = CupyLibrary().numbers(values).astype(array.dtype)

    def device(self, array: Any) -> str:
        """The GPU, such as `cuda:0`."""
        return f"cuda:{array.device.id}"

    def backend(self, device: str) -> str:
        """The kernels in CUDA C."""
        return "cupy"

    def allocate(
        self, params: Sequence[Any], specs: Sequence[StateSpec], shapes: Sequence[Sequence[tuple[int, ...]]],
        hyper: Sequence[Mapping[str, float]], facts: Sequence[Mapping[str, float]],
    ) -> list[dict[str, Any]]:  # fmt: skip
        """As of NumPy's; TensorError for states in bfloat16 where CuPy has none."""
        import cupy

        if any(spec.dtype == "bfloat16" for spec in specs) and int(cupy.__version__.partition(".")[0]) < 14:
            raise TensorError(
                f"CuPy {cupy.__version__} has no bfloat16: install CuPy 14 or later, or choose another state dtype"
            )
        return super().allocate(params, specs, shapes, hyper, facts)

    def scratch(self, like: Any, dtype: str) -> Any:
        import cupy

        size = like.size * numpy_dtype(dtype).itemsize
        with self._memory_for("what a step makes on the way", size, "use smaller arrays, or free memory"):
            return cupy.empty_like(like, dtype=numpy_dtype(dtype))

    def library(self, device: str, on_device: bool) -> Any:
        """CuPy on the device; NumPy for what is known here. TensorError for a backend that knows no device."""
        if on_device:
            return CupyLibrary()
        if device != "cpu":
            raise TensorError("CuPy arrays can be updated by backend 'cupy' alone: leave out the backend, or name it")
        return NumpyLibrary()

    def vector(self, values: np.ndarray[Any, Any], device: str | None = None) -> Vector:
        """A copy of the numbers, with a 0-d view of each: float64 on a device."""
        if device is None:
            return super().vector(values)
        numbers = CupyLibrary().numbers(values.astype(np.float64))
        return Vector(numbers, [numbers[i : i + 1].reshape(()) for i in range(numbers.size)])

    def _arena(self, size: int, tensors: int) -> Any:
        """Memory on the device; TensorError, with how much was wanted, where there is none."""
        import cupy

        advice = "nothing was changed; use fewer or narrower states (state_dtype), or free memory"
        with self._memory_for(f"the states of {tensors} arrays", size, advice):
            return cupy.empty(size, np.uint8)

    @contextmanager
    def _memory_for(self, what: str, size: int, advice: str) -> Iterator[None]:
        import cupy

        try:
            yield
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise TensorError(
                f"GPU {self.number} has no memory for {what} ({size / 2**20:.0f} MiB): {advice}"
            ) from error


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
    """CuPy on the current device. Nothing waits for the device, except for CuPy's own decompositions.

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
