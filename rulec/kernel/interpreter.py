"""An interpreter of nests, one element after the other: the meaning of every printed kernel.

It is a backend, so the conformance suite tests it like others. It is slow, and the default nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.array_api import bits
from rulec.array_api.reductions import REDUCTIONS
from rulec.backend.protocol import Rows, Scratch, Written
from rulec.compiler.ir import Program, Result
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.kernel.multi_tensor.arguments import in_memory
from rulec.kernel.nest import Level, Nest
from rulec.kernel.place import COL, ELEMENT, MATRIX, ROW, TENSOR
from rulec.language.expr.arithmetic import NUMPY
from rulec.language.expr.node import Node, Op, is_boolean, walk

Array = np.ndarray[Any, Any]


class Interpreter:
    """A backend with the nests themselves as its kernels, for NumPy's arrays."""

    name = "interpreter"

    def unavailable_reason(self) -> str | None:
        """None: it needs only NumPy."""
        return None

    def emit(self, program: Program, layout: Layout) -> str:
        """The nests of all stages, as text."""
        nests = [Nest(program, layout, stage) for stage in program.stages]
        return "\n".join(f"stage {index}\n{nest_text(nest)}" for index, nest in enumerate(nests))

    def build(self, program: Program, layout: Layout, source: str) -> InterpretedKernel:
        """The kernel of a program; the text is not read."""
        return InterpretedKernel(program, layout)


def nest_text(nest: Nest) -> str:
    """A nest as text, one line for each level."""
    lines = []
    for depth, level in enumerate(nest.levels()):
        parts = [("reads", level.reads), ("empties", level.empties), ("totals", level.totals)]
        does = [f"{word} {', '.join(r.name for r in results)}" for word, results in parts if results]
        if level.place == ELEMENT:
            read = {n.arg for n in walk(nest.stage.roots) if n.op is Op.LOAD}
            moved = (("loads", [b for b in nest.buffers if b in read]), ("stores", nest.stored))
            does = [f"{word} {', '.join(buffers)}" for word, buffers in moved if buffers]
        lines.append(f"{'  ' * depth}{level.place}{': ' * bool(does)}{'; '.join(does)}\n")
    return "".join(lines)


@dataclass(frozen=True)
class InterpretedKernel:
    """A program and its layout."""

    program: Program
    layout: Layout

    def bind(
        self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = ()
    ) -> InterpretedCall:
        """A call over these arrays of NumPy."""
        return InterpretedCall(self, params, states, views)


@dataclass(frozen=True)
class InterpretedCall:
    """A kernel bound to the parameters and states of one bucket."""

    kernel: InterpretedKernel
    params: Sequence[Any]
    states: Sequence[dict[str, Any]]
    views: Sequence[MatrixView]

    def __call__(
        self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Runs a stage over every tensor of the bucket, or over `tensors` of it, in place."""
        program, layout = self.kernel.program, self.kernel.layout
        nest = Nest(program, layout, program.stages[stage])
        reduced: dict[str, list[Any]] = {r.name: [] for r in nest.stage.reduces}
        for place, (tensor, grad) in enumerate(
            zip(range(len(self.params)) if tensors is None else tensors, moving, strict=True)
        ):
            scratch_arrays = {name: arrays[place] for name, arrays in (scratch or {}).items()}
            arrays = {**self.states[tensor], "p": self.params[tensor], "g": grad, **scratch_arrays}
            extents = in_memory(self.views[tensor], layout.transposed) if self.views else (1, 1, grad.size)
            run = _Run(nest, arrays, rows.table[rows.index[tensor]], extents)
            with np.errstate(all="ignore"):
                run.inside(nest.levels(), {})
            for r in nest.stage.reduces:
                reduced[r.name].append(run.result(r))
        return Written(self.params, self.states, {name: _together(values) for name, values in reduced.items()})


def _together(values: list[Any]) -> Any:
    """Numbers of tensors as one array; results of rows and columns unchanged."""
    return values if any(np.ndim(v) for v in values) else np.array(values, np.float64)


class _Run:
    """A stage over one tensor of `extents`: matrices, their rows in memory, and the elements of a row."""

    def __init__(
        self, nest: Nest, arrays: Mapping[str, Array], row: Array, extents: tuple[int, int, int]
    ) -> None:  # fmt: skip
        self.nest, self.row, self.extents = nest, row, extents
        self.arrays = {name: np.asarray(array).reshape(-1) for name, array in arrays.items()}
        self.real = np.dtype(nest.layout.compute).type
        batch, height, width = extents
        sizes = {TENSOR: 1, ROW: batch * height, COL: batch * width}
        self.totals = {
            r.name: np.full(sizes[nest.place(r)], REDUCTIONS[r.value.op].nothing) for r in nest.stage.reduces
        }

    def inside(self, levels: Sequence[Level], at: dict[str, int]) -> None:
        """Runs the loops inside the first level. `at` has the current index of each level around them."""
        _, *inner = levels
        if not inner:
            self._element(at)
            return
        for index in self._indices(inner[0].place, at):
            self.inside(inner, {**at, inner[0].place: index})

    def _indices(self, place: str, at: Mapping[str, int]) -> range:
        batch, height, width = self.extents
        if place == MATRIX:
            return range(batch)
        around, count = (at.get(MATRIX), height) if place == ROW else (at.get(ROW), width)
        return range(batch * height * width) if around is None else range(around * count, (around + 1) * count)

    def _element(self, at: dict[str, int]) -> None:
        """Loads, values, stores and totals: every value is computed before the first is stored."""
        if ROW in at:
            width = self.extents[2]
            at = {**at, COL: at[MATRIX] * width + at[ELEMENT] - at[ROW] * width}
        values: dict[Node, Any] = {}
        for value in walk(self.nest.stage.roots):
            values[value] = self._value(value, values, at)
        for store in self.nest.stage.stores:
            self.arrays[store.buffer][at[ELEMENT]] = values[store.value]
        for r in self.nest.stage.reduces:
            totals, index = self.totals[r.name], {**at, TENSOR: 0}[self.nest.place(r)]
            totals[index] = REDUCTIONS[r.value.op].ufunc(totals[index], np.float64(values[r.value.args[0]]))

    def _value(self, value: Node, values: Mapping[Node, Any], at: Mapping[str, int]) -> Any:
        if value.op is Op.CONST:
            return self.real(value.arg)
        if value.op is Op.SCALAR:
            number = self.row[int(value.arg)]  # type: ignore[call-overload]
            truth = is_boolean(self.nest.program.columns[int(value.arg)].value)  # type: ignore[call-overload]
            return number != 0 if truth else self.real(number)
        if value.op is Op.LOAD:
            number = self.real(self.arrays[str(value.arg)][at[ELEMENT]])
            return -number if value.arg == "g" and self.nest.layout.maximize else number
        if value.op is Op.RESULT:
            vector = self.nest.program.result(str(value.arg))
            number = self.arrays[vector.name][at[self.nest.place(vector)]]
            return number != 0 if is_boolean(vector.value) else self.real(number)
        if value.op is Op.CHANCE:
            words = [values[x] for x in value.args[1:]]
            place = int(bits.in_piece(np, np.int64(at[ELEMENT]), *words[5:]))
            low, high = (np.array(place >> shift & 0xFFFFFFFF, np.uint32) for shift in (0, 32))
            return self.real(bits.chance_at(np, low, high, tuple(words[:5])))
        result = NUMPY[value.op](*(values[x] for x in value.args))
        return bool(result) if is_boolean(value) else self.real(result)

    def result(self, reduction: Result) -> Any:
        """The result of a reduction: a number, or `(batch, rows, 1)` or `(batch, 1, cols)` in the rule's view."""
        totals = self.totals[reduction.name]
        if self.nest.place(reduction) == TENSOR:
            return float(totals[0])
        batch = self.extents[0]
        return totals.reshape((batch, -1, 1) if "i" in reduction.axes.letters else (batch, 1, -1))
