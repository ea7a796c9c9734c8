"""What the runtime asks of a kind of array: NumPy's in `rulec.array`, torch's in `rulec.torch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rulec.arrays.library import Library
from rulec.runtime.state import StateSpec


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
        ...

    def dtype(self, array: Any) -> str:
        """The dtype by our name; TensorError for one that no kernel stores."""
        ...

    def device(self, array: Any) -> str:
        """A word for where the memory is: arrays of different devices never share a bucket."""
        ...

    def backend(self, device: str) -> str:
        """The name of the backend to use there unless another is asked for."""
        ...

    def gradient_check(
        self, params: Sequence[Any], dtype: str, names: Sequence[str]
    ) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """A function of these parameters' gradients that gives them as kernels can read them.

        It raises TensorError, naming the tensor, where one does not fit its parameter or is not of this dtype.
        """
        ...

    def allocate(
        self, params: Sequence[Any], specs: Sequence[StateSpec], shapes: Sequence[Sequence[tuple[int, ...]]],
        hyper: Sequence[Mapping[str, float]], facts: Sequence[Mapping[str, float]],
    ) -> list[dict[str, Any]]:  # fmt: skip
        """For each parameter its initialised states by name, of the shapes given.

        Those of its own shape are contiguous in its memory order, others as their shape says.
        """
        ...

    def scratch(self, like: Any, dtype: str) -> Any:
        """Uninitialised memory for one step, in the shape and memory order of a parameter."""
        ...

    def plain(self, array: Any) -> bool:
        """Whether the elements lie in memory in the order that the shape says."""
        ...

    def library(self, device: str, on_device: bool) -> Library:
        """What is worked out between stages with: NumPy, or, where `on_device`, the framework on that device."""
        ...

    def vector(self, values: np.ndarray[Any, Any], device: str | None = None) -> Vector:
        """A copy of these numbers (float64, or int64 for step counts), one for each tensor; on a device, or here."""
        ...
