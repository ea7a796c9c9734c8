"""CuPy arrays as the runtime sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from rulec.array.arrays import NumpyArrays, numpy_dtype
from rulec.array.cupy_library import CupyLibrary
from rulec.array_api.numpy import NumpyLibrary
from rulec.errors import TensorError
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
