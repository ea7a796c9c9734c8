"""Functional kernels for jax and mlx, printed and called: stages return new arrays, and arrays are never written."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rulec.backend.printer import bare
from rulec.backend.protocol import Rows, Scratch, Written
from rulec.compiler.ir import Program, Result
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.errors import BackendUnavailable, BackendUnsupported, InternalError
from rulec.extras import command
from rulec.kernel.multi_tensor.slots import of_all

from .array_print import Dialect, StageFunction, print_file
from .text import run_source

#: New values by buffer, and reductions by name.
Done = tuple[dict[str, Any], dict[str, Any]]


class PureBackend(ABC):
    """A backend of functions that return new arrays.

    `float64` tells how to allow the library 64 bits. `cached` makes a kernel of a program, layout and source, or gives
    the one that it made before: a second build then traces nothing again.
    """

    name: str
    kernel: type[PureKernel]
    cached: Callable[[Program, Layout, str], PureKernel]
    float64: str

    def unavailable_reason(self) -> str | None:
        """None with the library on this machine; else the remedy, in one line."""
        return None if importlib.util.find_spec(self.name) else f"{self.name} is not installed: {command(self.name)}"

    @abstractmethod
    def has_float64(self) -> bool:
        """Whether the library now computes in 64 bits."""

    def emit(self, program: Program, layout: Layout) -> str:
        """The source: a function for each stage, `step`, or `stage_0` and so on, with one tensor's new values.

        BackendUnsupported for an operation that the library lacks.
        """
        function = self.kernel.function
        return print_file(function.dialect, program, layout, [f.text() for f in self.kernel.printed(program, layout)])

    def build(self, program: Program, layout: Layout, source: str) -> Any:
        """The kernel of a source text. BackendUnavailable for float64 where the library has it not."""
        if layout.compute == "float64" and not self.has_float64():
            raise BackendUnavailable(f"{program.name} on float64 needs {self.float64}, or use float32")
        return self.cached(program, layout, source)


class PureKernel:
    """The functions of one program and layout, each of one stage."""

    function: type[PureFunction]
    functions: Sequence[PureFunction]

    def __init__(self, program: Program, layout: Layout, source: str) -> None:
        self.program, self.layout, self.functions = program, layout, self.printed(program, layout)
        names = run_source(self.function.dialect.backend, program.name, source)
        self.steps: list[Callable[..., Any]] = [names[f.name] for f in self.functions]

    @classmethod
    def printed(cls, program: Program, layout: Layout) -> Sequence[PureFunction]:
        """The functions, to be printed."""
        return [cls.function(program, layout, index) for index in range(len(program.stages))]

    def columns(self, stage: int) -> list[int]:
        """The columns of the scalar table that a stage reads, in order."""
        return self.functions[stage].columns()

    def stage(
        self, index: int, arrays: Mapping[str, Any], scalars: Sequence[Any], view: MatrixView | None = None
    ) -> Done:
        """A stage of one tensor, plain or under a transformation.

        `arrays` has, by name, its buffers, scratch and inputs in the tensor's shape, and its vectors in this shape or
        as `(batch, rows, cols)`. `scalars` are 0-d, of the compute dtype, for `columns(index)`. New values have the
        dtypes and shapes of the buffers; reductions are numbers or `(batch, rows, cols)`.
        """
        function = self.functions[index]
        if function.sees_matrices and view is None:
            raise InternalError("a stage that sees tensors as matrices was given no view")
        taken = {name: arrays[name] for name in (*function.buffers, *function.vectors)}
        return self.applied(index, taken, scalars, tuple(arrays["p"].shape), view)

    def applied(
        self, index: int, arrays: Mapping[str, Any], scalars: Sequence[Any], shape: tuple[int, ...],
        view: MatrixView | None,
    ) -> Done:  # fmt: skip
        """A stage of one tensor of this shape, with the arrays of its function by name."""
        function = self.functions[index]
        # Blocks are no dimension of the tensor.
        seen = (view.rows, view.cols) if view is not None and view.blocks else shape
        operands = [arrays[b] if seen is shape else arrays[b].reshape(seen) for b in function.buffers]
        operands += [self._vector(name, arrays[name], seen, view) for name in function.vectors]
        axes = view.axes if view is not None and function.takes_axes else ()
        new, reduced = self.evaluated(index, axes, [*operands, *scalars])
        stored = {b: self.stored(b, value, seen) for b, value in new.items()}
        if seen is not shape:
            stored = {b: value.reshape(shape) for b, value in stored.items()}
        return stored, {name: self._reduced(name, value, view) for name, value in reduced.items()}

    def evaluated(self, index: int, axes: Sequence[Any], operands: Sequence[Any]) -> Done:
        """The results of the printed function: new values, and reductions."""
        result = self.steps[index](*axes, *operands)
        return result if isinstance(result, tuple) else (result, {})

    @abstractmethod
    def stored(self, buffer: str, value: Any, shape: tuple[int, ...]) -> Any:
        """A value in the dtype of its buffer and the shape of its tensor."""

    def _vector(self, name: str, array: Any, shape: tuple[int, ...], view: MatrixView | None) -> Any:
        axes = self.program.result(name).axes
        if axes.elementwise:
            return array.reshape(shape)
        assert view is not None  # only a function of matrices reads vectors of rows and columns
        rows, cols = view.axes
        gone = ({*rows} if axes.rows is None else set()) | ({*cols} if axes.cols is None else set())
        return array.reshape(tuple(1 if axis in gone else size for axis, size in enumerate(shape)))

    def _reduced(self, name: str, value: Any, view: MatrixView | None) -> Any:
        axes = self.program.result(name).axes
        if view is None or axes.number:
            return value
        sides = view.batch, 1 if axes.rows is None else view.rows, 1 if axes.cols is None else view.cols
        return value.reshape(sides)

    def bind(
        self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = ()
    ) -> PureCall:
        """A call over these arrays. If they are donated, only its results can be used after it.

        BackendUnsupported for PyTorch's tensors.
        """
        if any(hasattr(p, "data_ptr") for p in params):
            raise BackendUnsupported(self.function.dialect.backend, "an update of PyTorch's tensors", self.program.name)
        return PureCall(self, params, states, views)

    @abstractmethod
    def run(self, index: int, stored: Any, call_arrays: Any, row: Any, view: MatrixView | None) -> Done:
        """A stage of one tensor: the buffers `stored` with their new values, and reductions.

        `call_arrays` are its gradient, scratch and inputs; `row` has the numbers of its columns.
        """


class PureCall:
    """A kernel bound to the parameters and states of one bucket; after each call, to their new values."""

    def __init__(
        self, kernel: PureKernel, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView]
    ) -> None:
        self._kernel = kernel
        self._params, self._states = list(params), [dict(s) for s in states]
        self._views: list[MatrixView | None] = [*views] or [None] * len(params)

    def __call__(
        self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """New (params, states) of the whole bucket, with all tensors, or only `tensors`, updated.

        New arrays take the places of stored scratch buffers in `scratch`.
        """
        kernel = self._kernel
        fired = list(range(len(self._params)) if tensors is None else tensors)
        table = rows.table[rows.index[fired]][:, kernel.columns(stage)].astype(kernel.layout.compute)
        reduced = []
        for place, (i, g, row) in enumerate(zip(fired, moving, table, strict=True)):
            stored = {"p": self._params[i], **self._states_of(i, stage)}
            call_arrays = {"g": g, **{b: arrays[place] for b, arrays in (scratch or {}).items()}}
            new, tensor_totals = kernel.run(stage, stored, call_arrays, row, self._views[i])
            self._params[i] = new.pop("p")
            reduced.append(tensor_totals)
            for buffer, value in new.items():
                if buffer in self._states[i]:
                    self._states[i][buffer] = value
                else:
                    scratch[buffer][place] = value  # type: ignore[index]
        arrays = [{name: np.array(value) for name, value in each.items()} for each in reduced]
        totals = of_all(kernel.functions[stage].stage, arrays)
        return Written(list(self._params), [dict(s) for s in self._states], totals)

    def _states_of(self, i: int, stage: int) -> dict[str, Any]:
        """The states of a tensor for a stage."""
        return {b: x for b, x in self._states[i].items() if b in self._kernel.functions[stage].buffers}


#: The names of the reduced axes, by the level of the result: arguments of the printed function.
_AXES = {"row": "cols", "col": "rows"}


class PureFunction(StageFunction, ABC):
    """One stage as a function that returns the new values of its buffers, and its reductions, if any."""

    #: The spelling of its library, and the dtype of reductions, in words.
    dialect: Dialect
    reduced_dtype = "float64"

    def __init__(self, program: Program, layout: Layout, index: int) -> None:
        levels = {str(r.value.arg) for r in program.stages[index].reduces}
        #: Whether the function takes, before its arrays, the numbers of their axes of rows and of columns.
        self.takes_axes = not levels.isdisjoint(_AXES)
        dialect = replace(self.dialect, parameters=("rows", "cols")) if self.takes_axes else self.dialect
        super().__init__(dialect, program, layout, index)
        self.index = index

    @abstractmethod
    def reduction(self, result: Result, operand: str, axes: str | None) -> str:
        """A reduction as an expression: over all of an operand, or over the axes of this name, kept with size 1."""

    def text(self) -> str:
        """The printed function."""
        return self.source(self._summary(), self._ending)

    def _summary(self) -> str:
        count, compute = len(self.program.stages), self.layout.compute
        if count == 1 and not self.reductions and not self.sees_matrices:
            return f"New values of one tensor's buffers, in {compute}. Arrays are of one shape, scalars 0-d."
        what = "New values of one tensor's buffers" if count == 1 else f"Stage {self.index} of {count} for one tensor"
        shapes = "of the tensor's shape or with 1 for some axes" if self.sees_matrices else "of one shape"
        returned = f", and reductions in {self.reduced_dtype}" if self.reductions else ""
        lines = [f"{what}{returned}.", f"Arrays are {shapes}, scalars 0-d; computed in {compute}."]
        lines += ["`rows` are the axes that hold the tensor's rows, `cols` those of its columns."] * self.takes_axes
        return "\n".join([lines[0], "", *(f"    {line}" for line in lines[1:]), "    "])

    def _ending(self, written: Mapping[str, str]) -> list[str]:
        lines = [f"{self.reductions[r.name]} = {self._reduction(r)}" for r in self.stage.reduces]
        new = f"{{{', '.join(f'{b!r}: {text}' for b, text in written.items())}}}"
        reduced = ", ".join(f"{name!r}: {local}" for name, local in self.reductions.items())
        return [*lines, f"return {new}, {{{reduced}}}" if reduced else f"return {new}"]

    def _reduction(self, result: Result) -> str:
        operand = bare(self.printer.text(result.value.args[0]))
        return self.reduction(result, operand, _AXES.get(str(result.value.arg)))
