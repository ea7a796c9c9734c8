"""The protocol of one kind of array. `rulec.array` implements it for NumPy, `rulec.torch` for torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rulec.array_api.library import Library
from rulec.runtime.storage.allocator import StateSpec


@dataclass(frozen=True)
class Vector:
    """One number per tensor, visible twice: to the runtime as one array, to users as a view per tensor.

    The array is NumPy's, or one on a device.
    """

    numbers: Any
    views: Sequence[Any]


class Arrays(Protocol):
    """How one kind of array is described, allocated and checked."""

    def shape(self, array: Any) -> tuple[int, ...]:
        """The shape."""
        return tuple(array.shape)

    def dtype(self, array: Any) -> str:
        """The dtype by rulec's name; TensorError for a dtype that no kernel stores."""
        ...

    def device(self, array: Any) -> str:
        """A word for the device of the memory: arrays of different devices never share a bucket."""
        ...

    def backend(self, device: str) -> str:
        """The name of the backend to use there unless another is asked for."""
        ...

    def gradient_check(
        self, params: Sequence[Any], dtype: str, names: Sequence[str]
    ) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """A function from the gradients of these parameters to arrays for kernels.

        It raises TensorError with the tensor's name where a gradient does not fit its parameter or has another dtype.
        """
        ...

    def allocate(
        self, params: Sequence[Any], specs: Sequence[StateSpec], shapes: Sequence[Sequence[tuple[int, ...]]],
        hyper: Sequence[Mapping[str, float]], facts: Sequence[Mapping[str, float]],
    ) -> list[dict[str, Any]]:  # fmt: skip
        """The initialised states of each parameter, by name, in these shapes.

        A state of its parameter's shape has the parameter's memory order; any other is contiguous in its own shape.
        """
        ...

    def scratch(self, like: Any, dtype: str) -> Any:
        """Uninitialised memory for one step, in the shape and memory order of a parameter."""
        ...

    def scratches(self, like: Any, dtype: str, count: int) -> Sequence[Any]:
        """Such memory for `count` parameters like a plain one: one piece after the other, if that spares a copy."""
        ...

    def plain(self, array: Any) -> bool:
        """Whether the elements lie in memory in the order of the shape."""
        ...

    def library(self, device: str, on_device: bool) -> Library:
        """The array library for values between stages: NumPy, or the framework on the device where `on_device`."""
        ...

    def vector(self, values: np.ndarray[Any, Any], device: str | None = None) -> Vector:
        """A copy of these numbers, one for each tensor: float64, or int64 for step counts. None is the host."""
        ...

    def vector_now(self, vector: Vector) -> Vector | None:
        """The same numbers where their memory is now; None where a view of one lies apart from the others."""
        ...
