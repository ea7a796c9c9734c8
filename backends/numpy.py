"""The numpy backend: readable array code, one statement for each named value. Nothing is fused and nothing compiled.

It is what to read beside a rule, and it runs wherever NumPy does; it makes temporaries as large as the tensors, so it
is not what to train with. The same code runs on the arrays of any library that follows the array API standard
(`__array_namespace__`, 2023.12 or later) and lets its arrays be written; `cbrt` and `erf`, which the standard lacks,
work where the library has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rulec.backend.layout import Layout
from rulec.backend.protocol import Rows, Written
from rulec.compiler.ir import Program
from rulec.compiler.view import MatrixView
from rulec.errors import BackendUnsupported
from rulec.language.node import Op

from .array_print import ArrayPrinter, Dialect
from .printed import run_source

_DIALECT = Dialect(
    backend="numpy",
    module="xp",
    parameters=("xp", "real"),
    imports=(),
    functions={name: f"from rulec_backends.numpy_words import {name}" for name in ("cbrt", "erf", "power", "sigmoid")},
    cast="real({})",
    number="real({})",
    copy="xp.asarray({}, copy=True)",
)


class NumpyBackend:
    """Array code for NumPy, and for libraries like it."""

    name = "numpy"

    def unavailable_reason(self) -> str | None:
        """None: rulec needs NumPy itself."""
        return None

    def emit(self, program: Program, layout: Layout) -> str:
        """A function `step` that updates one tensor. BackendUnsupported for a program that is not elementwise."""
        printer = _printer(program, layout)

        def writes(values: Mapping[str, str]) -> list[str]:
            return [f"{printer.arrays[b]}[...] = {_stored(printer, b, text)}" for b, text in values.items()]

        summary = (
            f"Update one tensor in place. Arrays are of one shape, scalars 0-d; computed in {layout.compute}.\n\n"
            f"    `xp` is the arrays' namespace, `real` makes {layout.compute} of a number or an array.\n    "
        )
        return printer.source(summary, writes)

    def build(self, program: Program, layout: Layout, source: str) -> NumpyKernel:
        """The kernel of a source text."""
        return NumpyKernel(_printer(program, layout), _step(program.name, source))


def _printer(program: Program, layout: Layout) -> ArrayPrinter:
    stores = program.stages[-1].stores
    written = {s.buffer for s in stores}
    # A value that is a buffer as it was must be read before that buffer is written.
    copied = [str(s.value.arg) for s in stores if s.value.op is Op.LOAD and s.value.arg in written]
    return ArrayPrinter(_DIALECT, program, layout, copied)


def _stored(printer: ArrayPrinter, buffer: str, text: str) -> str:
    if printer.layout.dtype(buffer) == printer.layout.compute:
        return text
    return f"xp.asarray({text}, dtype={printer.arrays[buffer]}.dtype)"


@functools.lru_cache(maxsize=1024)
def _step(name: str, source: str) -> Callable[..., None]:
    step: Callable[..., None] = run_source("numpy", name, source)["step"]
    return step


class NumpyKernel:
    """The function of one program and layout."""

    def __init__(self, printer: ArrayPrinter, step: Callable[..., None]) -> None:
        self.step = step
        self.buffers = printer.buffers
        self.columns = printer.columns()
        self.compute = printer.layout.compute
        self.rule = printer.program.name

    def bind(
        self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = ()
    ) -> NumpyCall:
        """A call over these arrays, of the layout's dtypes, which must not share memory with each other.

        Raises BackendUnsupported for arrays that cannot be written in place.
        """
        return NumpyCall(self, params, states)


class NumpyCall:
    """A kernel bound to the parameters and states of one bucket."""

    def __init__(self, kernel: NumpyKernel, params: Sequence[Any], states: Sequence[dict[str, Any]]) -> None:
        self._kernel = kernel
        self._written = Written(params, states)
        self._namespace: Any = _namespace(params[0], kernel.rule) if params else np
        self._real = functools.partial(self._namespace.asarray, dtype=getattr(self._namespace, kernel.compute))
        self._buffers = [
            [None if b == "g" else param if b == "p" else state[b] for b in kernel.buffers]
            for param, state in zip(params, states, strict=True)
        ]

    def __call__(
        self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Any = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Updates every tensor of the bucket, or `tensors` of it, in place; returns the bound params and states."""
        fired = range(len(self._buffers)) if tensors is None else tensors
        scalars: dict[int, list[Any]] = {}
        with np.errstate(all="ignore"):
            for tensor, gradient in zip(fired, moving, strict=True):
                row = int(rows.index[tensor])
                if row not in scalars:
                    scalars[row] = [self._real(x) for x in rows.table[row, self._kernel.columns].tolist()]
                arrays = [gradient if b is None else b for b in self._buffers[tensor]]
                self._kernel.step(self._namespace, self._real, *arrays, *scalars[row])
        return self._written


def _namespace(array: Any, rule: str) -> Any:
    """The array API namespace of an array that can be written."""
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
