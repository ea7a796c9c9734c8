"""The bounds of a backend's results: a program computed with intervals, each operation as inexact as on its machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rulec.array.arrays import numpy_dtype
from rulec.compiler.ir import Program
from rulec.language.expr.arithmetic import NUMPY
from rulec.language.expr.node import Kind, Node, Op, is_boolean, walk
from rulec.language.expr.ops import having
from rulec.testing.interval import Array, Range, Truth, apply, between, hull, point, widen
from rulec.testing.kinds import EPS, LARGEST, SMALLEST_NORMAL, Numerics

_ERRORS = having("error")
_EXACT = tuple(op for op, error in _ERRORS.items() if error == "exact")

#: Operations rounded to the nearest number in NumPy, too.
_ROUNDED = tuple(op for op, error in _ERRORS.items() if error == "nearest")


@dataclass(frozen=True)
class StageInputs:
    """The inputs of a stage for each element, in float64.

    `loads` has the buffers by name, `columns` each element's row of the scalar table (elements x columns), and
    `vectors` the vectors by name.
    """

    loads: Mapping[str, Array]
    columns: Array
    vectors: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """Arithmetic in the dtype `compute` on a machine of these numerics, on ranges."""

    compute: str
    numerics: Numerics

    def operation(self, op: Op, operands: Sequence[Any]) -> Any:
        """The range of an elementwise operation, rounded."""
        if op is Op.FLOORDIV:
            return apply(Op.FLOOR, [self.operation(Op.DIV, operands)])
        if op is Op.RSQRT:
            return self.operation(Op.DIV, [point(1.0), self.operation(Op.SQRT, operands)])
        result = apply(op, operands)
        if op in _EXACT or op.kind in (Kind.COMPARE, Kind.LOGIC):
            return result
        return self._rounded(result, self.numerics.ulps(op))

    def _rounded(self, r: Range, ulps: float) -> Range:
        eps, smallest, largest = (table[self.compute] for table in (EPS, SMALLEST_NORMAL, LARGEST))
        return widen(r, ulps, eps, smallest, largest, self.numerics.flushes)

    def number(self, value: Array) -> Range:
        """The range of a number on the machine: rounded to the compute dtype, or not yet."""
        rounded = np.asarray(value).astype(self.compute).astype(np.float64)
        either = between(np.minimum(value, rounded), np.maximum(value, rounded))
        if not self.numerics.flushes:
            return either
        tiny = (np.abs(value) < SMALLEST_NORMAL[self.compute]) & (np.asarray(value) != 0)
        zero = hull(either, point(np.zeros(np.shape(value))))
        return Range(np.where(tiny, zero.low, either.low), np.where(tiny, zero.high, either.high), either.nan)


class Bounds:
    """The ranges of the values stored and reduced by a stage, in dtype `compute` on a machine of these numerics."""

    def __init__(self, program: Program, compute: str, numerics: Numerics, stage: int = 0) -> None:
        self.program, self.compute, self.numerics = program, compute, numerics
        self.machine = Machine(compute, numerics)
        self.stage = program.stages[stage]
        self.order = list(walk(self.stage.roots))
        plain = (*_EXACT, *_ROUNDED)
        #: Whether every operation of the stage has one nearest result, the same in NumPy.
        self.is_rounded = all(
            n.op in plain or n.op.kind in (Kind.LEAF, Kind.COMPARE, Kind.LOGIC, Kind.REDUCE) for n in self.order
        )

    def ranges(self, inputs: StageInputs) -> tuple[dict[str, Range], dict[str, Range]]:
        """Buffer -> range of its stored value before rounding to its dtype, and reduction -> range of its operand."""
        values: dict[Node, Any] = {}
        with np.errstate(all="ignore"):
            for node in self.order:
                values[node] = self._value(node, values, inputs)
        stored = {s.buffer: self._subnormal_zero(values[s.value]) for s in self.stage.stores}
        reduced = {r.name: self._subnormal_zero(values[r.value.args[0]]) for r in self.stage.reduces}
        return stored, reduced

    def rounded(self, inputs: StageInputs) -> tuple[dict[str, Array], dict[str, Array]]:
        """The same values with each operation rounded to the nearest number of `compute`: they lie in the ranges.

        The stage must be one that `is_rounded`.
        """
        narrow = {name: x.astype(self.compute) for name, x in inputs.loads.items()}
        vectors = {name: x.astype(self.compute) for name, x in inputs.vectors.items()}
        columns = inputs.columns.astype(self.compute)
        stored, operands = self.exact(StageInputs(narrow, columns, vectors), np.dtype(self.compute).type)
        return stored, operands

    def exact(self, inputs: StageInputs, number: type[Any] = np.float64) -> tuple[dict[str, Array], dict[str, Array]]:
        """The same values in float64, by the definition of the language; constants are made by `number`."""
        values: dict[Node, Any] = {}
        with np.errstate(all="ignore"):
            for node in self.order:
                values[node] = self._exact(node, values, inputs, number)
        stored = {s.buffer: values[s.value] for s in self.stage.stores}
        return stored, {r.name: values[r.value.args[0]] for r in self.stage.reduces}

    def _exact(self, node: Node, values: Mapping[Node, Any], inputs: StageInputs, number: type[Any]) -> Any:
        if node.op is Op.CONST:
            return number(node.arg)
        if node.op is Op.LOAD:
            return inputs.loads[str(node.arg)]
        if node.op in (Op.SCALAR, Op.RESULT):
            value = self._leaf(node, inputs)
            return value != 0 if self._is_truth(node) else value
        return NUMPY[node.op](*(values[a] for a in node.args))

    @staticmethod
    def _leaf(node: Node, inputs: StageInputs) -> Array:
        return inputs.columns[:, node.arg] if node.op is Op.SCALAR else inputs.vectors[str(node.arg)]  # type: ignore[index]

    def _is_truth(self, node: Node) -> bool:
        """Whether a column of the scalar table, or a vector, has truth values rather than numbers."""
        if node.op is Op.SCALAR:
            return is_boolean(self.program.columns[node.arg].value)  # type: ignore[call-overload]
        return is_boolean(self.program.result(str(node.arg)).value)

    def _subnormal_zero(self, r: Range) -> Range:
        """The range with all subnormal numbers where it holds 0, on a machine that counts them as zero."""
        if not self.numerics.flushes:
            return r
        least, zero = SMALLEST_NORMAL[self.compute], r.holds(0)
        low, high = np.where(zero, np.minimum(r.low, -least), r.low), np.where(zero, np.maximum(r.high, least), r.high)
        return Range(low, high, r.nan)

    def _value(self, node: Node, values: Mapping[Node, Any], inputs: StageInputs) -> Any:
        if node.op is Op.CONST:
            return self.machine.number(np.float64(node.arg))  # type: ignore[arg-type]
        if node.op is Op.LOAD:
            return self.machine.number(inputs.loads[str(node.arg)])
        if node.op in (Op.SCALAR, Op.RESULT):
            value = self._leaf(node, inputs)
            return Truth(value != 0, value == 0) if self._is_truth(node) else self.machine.number(value)
        return self.machine.operation(node.op, [values[a] for a in node.args])


def rounded_to(r: Range, dtype: str) -> Range:
    """The range of a value after its store in `dtype`: rounding never changes the order of numbers.

    A float64 may be rounded to 16 bits directly or through float32: the ends move outwards to cover both.
    """
    low, high = r.low, r.high
    if dtype in ("bfloat16", "float16"):
        low, high = _outwards(low, -np.inf), _outwards(high, np.inf)
    with np.errstate(all="ignore"):
        target = numpy_dtype(dtype)
        return Range(low.astype(target).astype(np.float64), high.astype(target).astype(np.float64), r.nan)


def _outwards(x: Array, limit: float) -> Array:
    """`x` rounded to float32 towards `limit`."""
    with np.errstate(all="ignore"):
        near = x.astype(np.float32)
        beyond = near < x if limit > 0 else near > x
        return np.where(beyond, np.nextafter(near, np.float32(limit)), near)
