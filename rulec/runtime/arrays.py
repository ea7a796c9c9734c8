"""What the runtime asks of a kind of array: NumPy's in `rulec.array`, torch's in `rulec.torch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rulec.language.node import Op
from rulec.runtime.state import StateSpec


@dataclass(frozen=True)
class Vector:
    """One number per tensor, visible twice: to the runtime as one NumPy array, to users as a view per tensor."""

    numbers: np.ndarray[Any, Any]
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

    def numbers(self, array: Any) -> np.ndarray[Any, Any]:
        """The elements as a NumPy array of float32 or float64: the same memory where that is the dtype, else a copy."""
        ...

    def wrapped(self, numbers: np.ndarray[Any, Any]) -> Any:
        """A C-contiguous NumPy array of float32 or float64 as an array of this kind, of the same memory if possible."""
        ...

    def write(self, array: Any, numbers: np.ndarray[Any, Any]) -> None:
        """Gives the array these values, rounded to its dtype."""
        ...

    @property
    def matrix_functions(self) -> Mapping[Op, Callable[..., Any]]:
        """The matrix functions, on NumPy arrays `(batch, rows, cols)`, by the library of these arrays."""
        ...

    def vector(self, values: np.ndarray[Any, Any]) -> Vector:
        """A copy of these numbers (float64, or int64 for step counts), one for each tensor."""
        ...
