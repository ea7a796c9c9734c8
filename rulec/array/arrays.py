"""NumPy arrays as the runtime sees them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from rulec.array_api.numpy import NumpyLibrary
from rulec.compiler.layout import FLOATS
from rulec.errors import TensorError
from rulec.runtime.arrays import Arrays, Vector
from rulec.runtime.storage.allocator import StateSpec, aligned_bytes, plan_arena

Array = np.ndarray[Any, Any]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of that name of ours; bfloat16 needs the package ml_dtypes."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise TensorError(
            "NumPy has no bfloat16 of its own: install ml_dtypes, or choose another state dtype"
        ) from None
    return np.dtype(ml_dtypes.bfloat16)  # type: ignore[no-any-return]


class NumpyArrays(Arrays):
    """NumPy arrays of float32, float64, float16, and bfloat16 (ml_dtypes), contiguous in C or Fortran order."""

    #: Their name in messages, and the prefix of their library's functions.
    kind, module = "NumPy array", "np"

    def __init__(self) -> None:
        self._owned: list[tuple[int, int, str]] = []  # ranges of addresses that a step writes, sorted

    def claim(self, arrays: Sequence[Array], names: Sequence[str]) -> None:
        """Remembers arrays that steps write to; TensorError where two of them share memory, or one is given twice."""
        starts = map(self.address, arrays)
        ranges = [(x, x + a.nbytes, name) for x, a, name in zip(starts, arrays, names, strict=True) if a.nbytes]
        self._owned = sorted(self._owned + ranges)
        for (_, end, before), (start, _, after) in pairwise(self._owned):
            if start < end:
                raise TensorError(f"{before} and {after} share memory: give each array once")

    @contextmanager
    def here(self) -> Iterator[None]:
        """Surrounds what works on the arrays."""
        yield

    def is_one(self, array: Any) -> bool:
        """Whether it is an array of this kind."""
        return isinstance(array, np.ndarray)

    def address(self, array: Array) -> int:
        """Where its memory begins."""
        return int(array.__array_interface__["data"][0])

    def copied(self, array: Any) -> Array:
        """A copy of an array of this kind, or of NumPy's, as NumPy's."""
        return np.array(array)

    def fill(self, array: Any, values: Any) -> None:
        """Gives an array of this kind, or of NumPy's, the values of one of NumPy's."""
        array[...] = values

    def dtype(self, array: Array) -> str:
        name: str = array.dtype.name
        if name not in FLOATS:
            raise TensorError(f"an array of dtype {name} cannot be optimized: use one of {', '.join(FLOATS)}")
        if not array.dtype.isnative:
            raise TensorError(
                "an array in foreign byte order cannot be optimized: use array.astype of its native dtype"
            )
        return name

    def device(self, array: Array) -> str:
        """Always the CPU."""
        return "cpu"

    def backend(self, device: str) -> str:
        """The fused CPU kernels."""
        return "cpu"

    def check_parameter(self, array: Any, name: str) -> None:
        """TensorError where the array cannot be updated in place."""
        if not self.is_one(array):
            raise TensorError(f"parameter {name} is a {type(array).__name__}, not a {self.kind}")
        self.dtype(array)
        if not getattr(array.flags, "writeable", True):
            raise TensorError(f"parameter {name} is read-only and cannot be updated in place: pass a writable array")
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            raise TensorError(
                f"parameter {name} is not contiguous: pass {self.module}.ascontiguousarray of it, or the whole array"
            )

    def gradient_check(
        self, params: Sequence[Array], dtype: str, names: Sequence[str]
    ) -> Callable[[Sequence[Any]], Sequence[Array]]:
        """A function that gives the same gradients, or TensorError where one does not fit its parameter."""

        wanted, shapes = numpy_dtype(dtype), [param.shape for param in params]

        def check(grads: Sequence[Any]) -> Sequence[Array]:
            for grad, param, shape, name in zip(grads, params, shapes, names, strict=True):
                if param.shape != shape:
                    raise TensorError(
                        f"parameter {name} has shape {param.shape} now, where its states have {shape}: give it its "
                        f"shape again, or make an optimizer for the new one"
                    )
                self._check_gradient(grad, param, wanted, name)
            self._check_apart(grads, names)
            return grads

        return check

    def _check_apart(self, grads: Sequence[Array], names: Sequence[str]) -> None:
        """TensorError where a gradient lies in memory that the step writes: it might change before it is read."""
        starts = np.array([self.address(g) for g in grads], np.int64)
        ends = starts + np.array([g.nbytes for g in grads], np.int64)
        owned_ends = np.array([end for _, end, _ in self._owned], np.int64)
        first = np.searchsorted(owned_ends, starts, side="right")
        inside = np.flatnonzero((first < owned_ends.size) & (ends > starts))
        for i in inside:
            start, _, owner = self._owned[first[i]]
            if start < ends[i]:
                raise TensorError(f"the gradient of {names[int(i)]} shares memory with {owner}: pass a copy of it")

    def _check_gradient(self, grad: Any, param: Array, dtype: np.dtype[Any], name: str) -> None:
        if not self.is_one(grad):
            raise TensorError(f"the gradient of {name} is a {type(grad).__name__}, not a {self.kind}")
        if grad.shape != param.shape:
            raise TensorError(f"the gradient of {name} has shape {grad.shape}, its parameter {param.shape}")
        if grad.dtype != dtype:
            raise TensorError(f"the gradient of {name} has dtype {grad.dtype}, where {dtype} is expected")
        flags, wanted = grad.flags, param.flags
        if not ((flags.c_contiguous and wanted.c_contiguous) or (flags.f_contiguous and wanted.f_contiguous)):
            order = "C" if wanted.c_contiguous else "F"
            raise TensorError(
                f"the gradient of {name} is not contiguous in its parameter's memory order: "
                f"pass {self.module}.asarray(grad, order={order!r})"
            )

    def allocate(
        self, params: Sequence[Array], specs: Sequence[StateSpec], shapes: Sequence[Sequence[tuple[int, ...]]],
        hyper: Sequence[Mapping[str, float]], facts: Sequence[Mapping[str, float]],
    ) -> list[dict[str, Array]]:  # fmt: skip
        """For each parameter its states: named views of one arena, disjoint and aligned, in its memory order."""
        slots, size = plan_arena(specs, [[math.prod(shape) for shape in sizes] for sizes in shapes])
        arena = self._arena(size, len(params))
        self.claim([arena], ["the optimizer's state"])
        by_name = {spec.name: (index, spec) for index, spec in enumerate(specs)}
        states: list[dict[str, Array]] = [{} for _ in params]
        for slot in slots:
            (index, spec), param = by_name[slot.name], params[slot.tensor]
            flat = arena[slot.offset : slot.offset + slot.size].view(numpy_dtype(spec.dtype))
            shape = shapes[slot.tensor][index]
            turned = spec.like_parameter and not param.flags.c_contiguous
            state = flat.reshape(shape[::-1]).T if turned else flat.reshape(shape)
            self._initialise(state, spec, param, hyper[slot.tensor], facts[slot.tensor])
            states[slot.tensor][spec.name] = state
        return states

    def _arena(self, size: int, tensors: int) -> Any:
        """Memory for the states of some tensors."""
        return aligned_bytes(size)

    def _initialise(
        self, state: Array, spec: StateSpec, param: Array, hyper: Mapping[str, float], facts: Mapping[str, float]
    ) -> None:
        if spec.copies_parameter:
            state[...] = param
        elif spec.reads_parameter:
            self.fill(state, spec.values(hyper, facts, self.copied(param).astype(np.float64)))
        else:
            state[...] = spec.number(hyper, facts)

    def scratch(self, like: Array, dtype: str) -> Array:
        return np.empty_like(like, dtype=numpy_dtype(dtype))

    def scratches(self, like: Array, dtype: str, count: int) -> list[Array]:
        """Each by itself."""
        return [self.scratch(like, dtype) for _ in range(count)]

    def plain(self, array: Array) -> bool:
        """Whether the array is in C order."""
        return bool(array.flags.c_contiguous)

    def library(self, device: str, on_device: bool) -> NumpyLibrary:
        """NumPy."""
        return NumpyLibrary()

    def vector(self, values: Array, device: str | None = None) -> Vector:
        """A copy of the numbers, with a 0-d view of each."""
        numbers = values.copy()
        return Vector(numbers, [numbers[i : i + 1].reshape(()) for i in range(numbers.size)])

    def vector_now(self, vector: Vector) -> Vector:
        """The same: views of an array that owns its memory keep theirs."""
        return vector
