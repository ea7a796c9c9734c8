"""What is computed between the stages: arithmetic, reductions and matrix functions on arrays of one kind.

Backends of the CPU leave their results to NumPy; those that work on a device leave them there, for the tensors' own
framework, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np

from rulec.arrays.numpy import NUMPY_MATRIX
from rulec.compiler import random
from rulec.compiler.reductions import REDUCTIONS
from rulec.language.arithmetic import NUMPY
from rulec.language.node import Op

Array = np.ndarray[Any, Any]


class Library(Protocol):
    """Functions on arrays of one kind, on one device.

    Numbers of tensors, groups and the model are float64 arrays of one dimension, or none. Vectors and matrices are
    stacks `(batch, rows, cols)`. Where an array is of the device, no function here waits for it, but for decompositions
    that the framework itself waits in.
    """

    @property
    def arithmetic(self) -> Mapping[Op, Callable[..., Any]]:
        """The elementwise operations."""
        ...

    @property
    def matrix(self) -> Mapping[Op, Callable[..., Any]]:
        """The matrix functions; the numbers beside matrices are Python's where they are known."""
        ...

    def constant(self, value: float) -> Any:
        """One number, which takes part in arithmetic with arrays."""
        ...

    def numbers(self, values: Any) -> Any:
        """NumPy's numbers, or an array of another library or device, as an array of this one."""
        ...

    def read(self, array: Any) -> Any:
        """The elements of a stored array, in float32 or float64: the same memory where that is the dtype."""
        ...

    def write(self, array: Any, values: Any) -> None:
        """Gives a stored array these values, rounded to its dtype."""
        ...

    def handed(self, values: Any, dtype: str, own: bool) -> Any:
        """Values as kernels read them: contiguous, of this dtype, and where `own` in memory of their own."""
        ...

    def cast(self, values: Any, dtype: str) -> Any:
        """Values in another dtype; the same array where it has it."""
        ...

    def copy(self, values: Any) -> Any:
        """The same values in memory of their own."""
        ...

    def spread(self, values: Any, shape: tuple[int, ...]) -> Any:
        """Values broadcast to a shape, as a view."""
        ...

    def at(self, values: Any, i: int) -> Any:
        """The number of tensor i among numbers of tensors, which takes the dtype of the array it meets."""
        ...

    def take(self, values: Any, places: Array) -> Any:
        """The numbers at these places."""
        ...

    def put(self, into: Any, places: Array | slice, values: Any) -> None:
        """Writes numbers at these places, or one at all of them."""
        ...

    def together(self, numbers: Sequence[Any]) -> Any:
        """Arrays of one element each, in any shape, as numbers of tensors."""
        ...

    def stack(self, matrices: Sequence[Any]) -> Any:
        """Several stacks as one."""
        ...

    def split(self, matrices: Any, count: int) -> Sequence[Any]:
        """The inverse of `stack`, for stacks of equal length."""
        ...

    def reduce(self, op: Op, values: Any, axes: tuple[int, ...] | None = None) -> Any:
        """A sum, minimum or maximum in float64: over these axes, which stay with an extent of 1, or over everything."""
        ...

    def empty(self, count: int) -> Any:
        """Memory for so many numbers of float64."""
        ...

    def join(self, arrays: Sequence[Any], axis: int) -> Any:
        """Arrays side by side along an axis."""
        ...

    def product(self, a: Any, b: Any, into: Any = None) -> Any:
        """The product of two stacks of matrices of one dtype; where there is `into`, added to it in its memory."""
        ...

    def random(self, op: Op, count: int, position: Mapping[str, Any], block: int = 0) -> Any:
        """Uniform or normal numbers of the language's stream, in float64; the `step` may be an array of one number.

        The first is the first of four in a block of the stream.
        """
        ...

    def hold(self, thing: Any) -> None:
        """Keeps something for good where a graph is being captured that will read its memory again."""
        ...


class NumpyLibrary:
    """NumPy, on memory of NumPy's own or shared with it: what is known is known at once."""

    arithmetic = NUMPY
    matrix: Mapping[Op, Callable[..., Any]] = NUMPY_MATRIX

    def constant(self, value: float) -> Any:
        """A NumPy float64."""
        return np.float64(value)

    def numbers(self, values: Any) -> Array:
        """The same array."""
        return np.asarray(values)

    def read(self, array: Any) -> Array:
        """The array itself, or a copy in float32 of one of 16 bits."""
        return cast(Array, array if array.dtype in (np.float32, np.float64) else array.astype(np.float32))

    def write(self, array: Any, values: Array) -> None:
        """Gives the array these values, rounded to its dtype."""
        array[...] = values.reshape(array.shape)

    def handed(self, values: Array, dtype: str, own: bool) -> Any:
        """The same array where it will do."""
        return np.array(values, dtype, order="C", copy=True if own else None)

    def cast(self, values: Any, dtype: str) -> Array:
        """Values in another dtype."""
        return np.asarray(values).astype(dtype, copy=False)

    def copy(self, values: Any) -> Array:
        """A copy."""
        return np.array(values)

    def spread(self, values: Any, shape: tuple[int, ...]) -> Array:
        """A view, which cannot be written."""
        return np.broadcast_to(values, shape)

    def at(self, values: Any, i: int) -> Any:
        """A Python number."""
        found = values if np.ndim(values) == 0 else values[i]
        return bool(found) if np.asarray(found).dtype.kind == "b" else float(found)

    def take(self, values: Any, places: Array) -> Array:
        """The numbers at these places."""
        return cast(Array, values[places])

    def put(self, into: Any, places: Array | slice, values: Any) -> None:
        """Writes numbers at these places."""
        into[places] = values

    def together(self, numbers: Sequence[Any]) -> Array:
        """One array of all."""
        return np.array([x.reshape(-1)[0] for x in numbers], np.float64)

    def stack(self, matrices: Sequence[Any]) -> Array:
        """One after the other."""
        return np.concatenate(matrices)

    def split(self, matrices: Any, count: int) -> Sequence[Any]:
        """Views of one stack."""
        return np.split(matrices, count)

    def reduce(self, op: Op, values: Any, axes: tuple[int, ...] | None = None) -> Array:
        """By NumPy's pairwise sums."""
        start, ufunc = REDUCTIONS[op].nothing, REDUCTIONS[op].ufunc
        kept = axes is not None
        return cast(Array, ufunc.reduce(values, axis=axes, keepdims=kept, initial=start, dtype=np.float64))

    def empty(self, count: int) -> Array:
        """A new array."""
        return np.empty(count)

    def join(self, arrays: Sequence[Any], axis: int) -> Array:
        """One array of all."""
        return np.concatenate(arrays, axis)

    def product(self, a: Any, b: Any, into: Any = None) -> Array:
        """By NumPy."""
        made: Array = np.matmul(a, b)
        return made if into is None else cast(Array, np.add(into, made, out=into))

    def random(self, op: Op, count: int, position: Mapping[str, Any], block: int = 0) -> Array:
        """Worked out here."""
        where = {"block": block, **{name: int(x) for name, x in position.items()}}
        return random.normal(count, **where) if op is Op.NORMAL else random.uniform(random.stream(count, **where))

    def hold(self, thing: Any) -> None:
        """Nothing is captured here."""
