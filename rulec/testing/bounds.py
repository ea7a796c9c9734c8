"""What a backend may compute: a program walked over intervals, each operation as inexact as its machine may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rulec.array.arrays import numpy_dtype
from rulec.compiler.ir import Program
from rulec.language.arithmetic import NUMPY
from rulec.language.node import Kind, Node, Op, is_boolean, walk
from rulec.testing.interval import Array, Range, Truth, apply, between, hull, point, widen
from rulec.testing.numerics import EPS, LARGEST, SMALLEST_NORMAL, Numerics

_EXACT = (Op.NEG, Op.ABS, Op.SIGN, Op.FLOOR, Op.MINIMUM, Op.MAXIMUM, Op.WHERE, Op.ISFINITE)

#: What NumPy, too, rounds to the nearest number.
_ROUNDED = (Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.SQRT)


@dataclass(frozen=True)
class Given:
    """What the elements of a stage are made of, in float64 and for each element.

    `loads` are buffers, `columns` each element's row of the scalar table (elements x columns), `vectors` what else the
    stage reads.
    """

    loads: Mapping[str, Array]
    columns: Array
    vectors: Mapping[str, Array] = field(default_factory=dict)


class Bounds:
    """The ranges of what a stage stores and reduces, computed in `compute` on a machine of these numerics."""

    def __init__(self, program: Program, compute: str, numerics: Numerics, stage: int = 0) -> None:
        self.program, self.compute, self.numerics = program, compute, numerics
        self.stage = program.stages[stage]
        self.order = list(walk(self.stage.roots))
        plain = (*_EXACT, *_ROUNDED)
        #: Whether every operation of the stage has one nearest result, which NumPy gives.
        self.is_rounded = all(
            n.op in plain or n.op.kind in (Kind.LEAF, Kind.COMPARE, Kind.LOGIC, Kind.REDUCE) for n in self.order
        )

    def ranges(self, given: Given) -> tuple[dict[str, Range], dict[str, Range]]:
        """The range of each stored buffer, before it is rounded to the buffer's dtype, and of what is reduced."""
        values: dict[Node, Any] = {}
        with np.errstate(all="ignore"):
            for node in self.order:
                values[node] = self._value(node, values, given)
        stored = {s.buffer: self._subnormal_zero(values[s.value]) for s in self.stage.stores}
        reduced = {r.name: self._subnormal_zero(values[r.value.args[0]]) for r in self.stage.reduces}
        return stored, reduced

    def rounded(self, given: Given) -> tuple[dict[str, Array], dict[str, Array]]:
        """The same values where each operation gives the nearest number of `compute`: they lie in the ranges.

        Only of a stage that `is_rounded`.
        """
        narrow = {name: x.astype(self.compute) for name, x in given.loads.items()}
        vectors = {name: x.astype(self.compute) for name, x in given.vectors.items()}
        columns = given.columns.astype(self.compute)
        stored, operands = self.exact(Given(narrow, columns, vectors), np.dtype(self.compute).type)
        return stored, operands

    def exact(self, given: Given, number: type[Any] = np.float64) -> tuple[dict[str, Array], dict[str, Array]]:
        """The same values in float64, as the language defines them; constants are made by `number`."""
        values: dict[Node, Any] = {}
        with np.errstate(all="ignore"):
            for node in self.order:
                values[node] = self._exact(node, values, given, number)
        stored = {s.buffer: values[s.value] for s in self.stage.stores}
        return stored, {r.name: values[r.value.args[0]] for r in self.stage.reduces}

    def _exact(self, node: Node, values: Mapping[Node, Any], given: Given, number: type[Any]) -> Any:
        if node.op is Op.CONST:
            return number(node.arg)
        if node.op is Op.LOAD:
            return given.loads[str(node.arg)]
        if node.op in (Op.SCALAR, Op.RESULT):
            value = self._leaf(node, given)
            return value != 0 if self._is_truth(node) else value
        return NUMPY[node.op](*(values[a] for a in node.args))

    @staticmethod
    def _leaf(node: Node, given: Given) -> Array:
        return given.columns[:, node.arg] if node.op is Op.SCALAR else given.vectors[str(node.arg)]  # type: ignore[index]

    def _is_truth(self, node: Node) -> bool:
        """Whether a column of the scalar table or a vector is true or false rather than a number."""
        if node.op is Op.SCALAR:
            return is_boolean(self.program.columns[node.arg].value)  # type: ignore[call-overload]
        return is_boolean(self.program.result(str(node.arg)).value)

    def _subnormal_zero(self, r: Range) -> Range:
        """Where subnormal numbers count as zero, any of them may stand for it."""
        if not self.numerics.flushes:
            return r
        least, zero = SMALLEST_NORMAL[self.compute], r.holds(0)
        low, high = np.where(zero, np.minimum(r.low, -least), r.low), np.where(zero, np.maximum(r.high, least), r.high)
        return Range(low, high, r.nan)

    def _value(self, node: Node, values: Mapping[Node, Any], given: Given) -> Any:
        if node.op is Op.CONST:
            return self._given(np.float64(node.arg))  # type: ignore[arg-type]
        if node.op is Op.LOAD:
            return self._given(given.loads[str(node.arg)])
        if node.op in (Op.SCALAR, Op.RESULT):
            value = self._leaf(node, given)
            return Truth(value != 0, value == 0) if self._is_truth(node) else self._given(value)
        return self._operation(node.op, [values[a] for a in node.args])

    def _operation(self, op: Op, operands: Sequence[Any]) -> Any:
        if op is Op.FLOORDIV:
            return apply(Op.FLOOR, [self._operation(Op.DIV, operands)])
        if op is Op.RSQRT:
            return self._operation(Op.DIV, [point(1.0), self._operation(Op.SQRT, operands)])
        result = apply(op, operands)
        if op in _EXACT or op.kind in (Kind.COMPARE, Kind.LOGIC):
            return result
        return self._rounded(result, self.numerics.ulps(op))

    def _rounded(self, r: Range, ulps: float) -> Range:
        eps, smallest, largest = (table[self.compute] for table in (EPS, SMALLEST_NORMAL, LARGEST))
        return widen(r, ulps, eps, smallest, largest, self.numerics.flushes)

    def _given(self, value: Array) -> Range:
        """A number as the machine has it: rounded to the compute dtype, or not yet."""
        rounded = np.asarray(value).astype(self.compute).astype(np.float64)
        given = between(np.minimum(value, rounded), np.maximum(value, rounded))
        if not self.numerics.flushes:
            return given
        tiny = (np.abs(value) < SMALLEST_NORMAL[self.compute]) & (np.asarray(value) != 0)
        zero = hull(given, point(np.zeros(np.shape(value))))
        return Range(np.where(tiny, zero.low, given.low), np.where(tiny, zero.high, given.high), given.nan)


def rounded_to(r: Range, dtype: str) -> Range:
    """The range of a value once it is stored in `dtype`: rounding never changes the order of numbers.

    A float64 may be rounded to 16 bits through float32: the ends move outwards so that both ways lie within.
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
