"""The numpy backend: readable array code, one statement for each named value. Nothing is fused and nothing compiled.

Its source is good to read beside a rule, and runs wherever NumPy does. It makes temporaries as large as the tensors, so
it is slow for training. The same code runs on arrays of any library of the array API standard (`__array_namespace__`,
2023.12 or later) with writable arrays. `cbrt` and `erf` are not in the standard; they work where the library has them.
A stage gets the arrays of one tensor in their own shape, or as matrices.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rulec.backend.protocol import Rows, Scratch, Written
from rulec.compiler.ir import Axes, Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.errors import BackendUnsupported, InternalError, TensorError
from rulec.kernel.multi_tensor.slots import of_all

from ..common.array_print import print_file
from ..common.text import run_source
from .print import DIALECT, NumpyFunction


class NumpyBackend:
    """Array code for NumPy and similar libraries."""

    name = "numpy"

    def unavailable_reason(self) -> str | None:
        """None: rulec needs NumPy itself."""
        return None

    def emit(self, program: Program, layout: Layout) -> str:
        """The source: a function for each stage of one tensor, `step`, or `stage_0` and so on.

        BackendUnsupported for an operation without a function in array libraries.
        """
        return print_file(DIALECT, program, layout, [f.text() for f in _functions(program, layout)])

    def build(self, program: Program, layout: Layout, source: str) -> NumpyKernel:
        """The kernel of a source text."""
        return NumpyKernel(program, layout, source)


def _functions(program: Program, layout: Layout) -> list[NumpyFunction]:
    return [NumpyFunction(program, layout, index) for index in range(len(program.stages))]


@functools.lru_cache(maxsize=1024)
def _printed(name: str, source: str) -> dict[str, Any]:
    return run_source("numpy", name, source)


class NumpyKernel:
    """The functions of one program and layout."""

    def __init__(self, program: Program, layout: Layout, source: str) -> None:
        self.program, self.compute = program, layout.compute
        self.functions = _functions(program, layout)
        printed = _printed(program.name, source)
        #: The Python function of each stage.
        self.steps: list[Callable[..., dict[str, Any] | None]] = [printed[f.name] for f in self.functions]

    def bind(
        self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = ()
    ) -> NumpyCall:
        """A call over these arrays, of the layout's dtypes and in separate memory.

        BackendUnsupported for arrays that cannot be written in place.
        """
        return NumpyCall(self, params, states, views)


class NumpyCall:
    """A kernel bound to the parameters and states of one bucket."""

    def __init__(
        self, kernel: NumpyKernel, params: Sequence[Any], states: Sequence[dict[str, Any]],
        views: Sequence[MatrixView] = (),
    ) -> None:  # fmt: skip
        self._kernel, self._params, self._states = kernel, params, states
        self._namespace: Any = _namespace(params[0], kernel.program.name) if params else np
        self._real = functools.partial(self._namespace.asarray, dtype=getattr(self._namespace, kernel.compute))
        self._tensors = [
            TensorViews(self._namespace, {"p": param, **state}, view)
            for param, state, view in zip(params, states, views or itertools.repeat(None, len(params)), strict=True)
        ]

    def __call__(
        self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Runs a stage over every tensor of the bucket, or over `tensors` of it, in place."""
        function, step = self._kernel.functions[stage], self._kernel.steps[stage]
        columns = function.columns()
        fired = range(len(self._tensors)) if tensors is None else tensors
        scalars: dict[int, list[Any]] = {}
        results: list[dict[str, Any]] = []
        with np.errstate(all="ignore"):
            for place, (tensor, gradient) in enumerate(zip(fired, moving, strict=True)):
                row = int(rows.index[tensor])
                if row not in scalars:
                    scalars[row] = [self._real(x) for x in rows.table[row, columns].tolist()]
                call_arrays = {name: arrays[place] for name, arrays in (scratch or {}).items()}
                arrays = self._arrays(function, self._tensors[tensor], {"g": gradient, **call_arrays})
                results.append(step(self._namespace, self._real, *arrays, *scalars[row]) or {})
        return Written(self._params, self._states, of_all(function.stage, results))

    def _arrays(self, function: NumpyFunction, tensor: TensorViews, call_arrays: Mapping[str, Any]) -> list[Any]:
        """The array arguments of a stage's function: bound arrays, arrays of this call by name, and vectors."""
        viewed = function.sees_matrices
        operands = [
            tensor.passed(call_arrays[b], viewed) if b in call_arrays else tensor.bound(b, viewed)
            for b in function.buffers
        ]
        axes = (self._kernel.program.result(name).axes for name in function.vectors)
        return operands + [
            tensor.vector(call_arrays[v], a, viewed) for v, a in zip(function.vectors, axes, strict=True)
        ]


def _namespace(array: Any, rule: str) -> Any:
    """The array API namespace of a writable array. BackendUnsupported for any other array."""
    if not hasattr(array, "__array_namespace__"):
        raise BackendUnsupported("numpy", f"arrays of type {type(array).__name__}", rule)
    namespace = array.__array_namespace__()
    probe = namespace.zeros((1,))
    try:
        probe[...] = probe
    except TypeError:
        fault = f"arrays of type {type(array).__name__}, which cannot be written,"
        raise BackendUnsupported("numpy", fault, rule) from None
    return namespace


class TensorViews:
    """A parameter and its states, and their matrices under `view`; None where no stage sees matrices."""

    def __init__(self, namespace: Any, arrays: Mapping[str, Any], view: MatrixView | None) -> None:
        self.namespace, self.arrays, self.view = namespace, arrays, view
        self._matrices: dict[str, Any] = {}

    def bound(self, name: str, viewed: bool) -> Any:
        """A bound array, or its matrices."""
        if not viewed:
            return self.arrays[name]
        if name not in self._matrices:
            self._matrices[name] = self.matrices(self.arrays[name])
        return self._matrices[name]

    def passed(self, array: Any, viewed: bool) -> Any:
        """An array of a call, of the parameter's shape, or its matrices."""
        return self.matrices(array) if viewed else array

    def vector(self, array: Any, axes: Axes, viewed: bool) -> Any:
        """A vector in a shape that broadcasts with the parameter's."""
        if axes.elementwise:
            return self.matrices(array) if viewed else self.namespace.reshape(array, self.arrays["p"].shape)
        view = self._view()
        sizes = {"b": view.batch, "i": view.rows, "j": view.cols}
        return self.namespace.reshape(array, tuple(sizes[c] if c in axes.letters else 1 for c in "bij"))

    def matrices(self, array: Any) -> Any:
        """`array` as `(batch, rows, cols)`, in the same memory; TensorError where this is impossible."""
        view, same_memory = self._view(), {"copy": False}
        if self.namespace is np:
            # NumPy has `copy` from 2.1 on only.
            same_memory = {}
            if not array.flags.c_contiguous:
                raise TensorError(f"an array of shape {array.shape} is not contiguous: pass np.ascontiguousarray of it")
        sides = (view.cols, view.rows) if view.transposed else (view.rows, view.cols)
        matrices = self.namespace.reshape(array, (view.batch, *sides), **same_memory)
        return self.namespace.permute_dims(matrices, (0, 2, 1)) if view.transposed else matrices

    def _view(self) -> MatrixView:
        if self.view is None:
            raise InternalError("a stage that sees tensors as matrices was bound without their views")
        return self.view
