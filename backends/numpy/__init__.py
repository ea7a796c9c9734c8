"""The numpy backend: readable array code, one statement for each named value. Nothing is fused and nothing compiled.

Its source is good to read beside a rule, and runs wherever NumPy does. It makes temporaries as large as the tensors, so
it is slow for training. The same code runs on arrays of any library of the array API standard (`__array_namespace__`,
2023.12 or later) with writable arrays. `cbrt` and `erf` are not in the standard; they work where the library has them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rulec.backend.protocol import Rows, Scratch, Written
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.errors import BackendUnsupported
from rulec.kernel.multi_tensor.slots import of_all

from ..common.array_print import print_file
from ..common.printed import run_source
from .print import DIALECT, NumpyFunction
from .views import TensorViews


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
