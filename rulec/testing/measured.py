"""The bounds of the statistics of a step: its program computed with intervals, reductions and all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from rulec.compiler.interpreter import Arithmetic, Key, Run
from rulec.compiler.ir import PARTS
from rulec.compiler.reference import ReferenceOptimizer
from rulec.compiler.weights import number_in_memory
from rulec.errors import RuleError
from rulec.language.expr.arithmetic import NUMPY
from rulec.language.expr.node import Kind, Node, Op
from rulec.language.expr.static import statics
from rulec.testing.bounds import Machine, rounded_to
from rulec.testing.interval import Array, Range, Truth, hull, point
from rulec.testing.judge import reduce_range
from rulec.testing.kinds import PARTIAL_SUMS, SMALLEST_NORMAL, Numerics

#: Arrays as ranges of exactly their numbers.
_RANGES = Arithmetic(NUMPY, point, exact=False, rounded=lambda numbers, eps: numbers)


def statistic_ranges(
    optimizer: ReferenceOptimizer, grads: Sequence[Array], dtype: str, numerics: Numerics,
    inputs: Mapping[str, Any] | None = None, states: Mapping[str, str] | None = None,
) -> dict[str, dict[str, Range]]:  # fmt: skip
    """The ranges of the statistics of the next step of an optimizer, which stays as it is.

    `optimizer` computes in float64, and `grads` are in float64. The machine has parameters and gradients of `dtype`,
    and states too, except for those in `states`. The result has the places of
    `ReferenceOptimizer.statistics`. RuleError for a rule with matrix functions, whose errors have no bound, and for
    reductions per axis of a tensor.
    """
    compute = "float64" if dtype == "float64" else "float32"
    exact = optimizer.copy().runs(grads, inputs or {})
    runs = [_RangeRun(run, dtype, compute, numerics, states or {}) for run in exact]
    ranges: dict[str, dict[str, Range]] = {}
    for run in runs:
        run.family = [*runs]
    for run in runs:
        pending = run.execute_statistics()
        for (name, place), value in run.measured(pending, set()).items():
            ranges.setdefault(name, {})[place] = value
    return ranges


class _RangeRun(Run):
    """A step with ranges in the place of numbers.

    Values of elements, rows and columns are of the dtype `compute`, which numbers of tensors are rounded to where they
    meet; numbers themselves are of float64.
    """

    def __init__(self, run: Run, dtype: str, compute: str, numerics: Numerics, states: Mapping[str, str]) -> None:
        super().__init__(
            run.program, run.tensors, run.hyper, _RANGES, run.shared, run.gradients, run.seed, run.inputs
        )  # fmt: skip
        self.dtype, self.flushes = dtype, numerics.flushes
        self.narrow, self.wide = Machine(compute, numerics), Machine("float64", numerics)
        #: The new values of states in a narrower dtype: later lines may read them rounded or not.
        self.stored = {
            store.value: states.get(store.buffer, dtype)
            for store in run.program.stages[0].stores
            if "n" in self.program.buffer(store.buffer).axes.letters and store.buffer in self.program.rule.state
        }

    def execute_statistics(self) -> list[tuple[str, Key, Any]]:
        """The ranges of all statistics, by instance."""
        names = {b.name for b in self.program.statistics}
        stores = [*self.program.scalars.stores, *self.program.stages[0].stores]
        return self._stores([store for store in stores if store.buffer in names])

    def _compute(self, value: Node, key: Key) -> Any:
        result = self._range(value, key)
        dtype = self.stored.get(value)
        return hull(result, rounded_to(result, dtype)) if dtype and isinstance(result, Range) else result

    def _range(self, value: Node, key: Key) -> Any:
        if value.op.kind is Kind.LEAF:
            return self._leaf(value, key)
        if value.op.kind is Kind.REDUCE:
            return self._reduce(value, key)
        if value.op.kind is Kind.MATRIX:
            raise RuleError(f"{value.op.symbol} has no bound of its error")
        letters = self._letters(value)
        new = number_in_memory(value)
        if new is not None:
            return rounded_to(self._get(new, key, letters), self.dtype)
        operands = [self._get(a, key, letters) for a in value.args]
        if value.op.kind is Kind.RANDOM:
            return self._random(value, [x.low for x in operands], key)
        if value.op in (Op.SPREAD, Op.WIDEN, Op.CHANCE):
            raise RuleError(f"{value.op.name.lower()} has no bound of its error")
        if not self._is_of_elements(letters):
            return self.wide.operation(value.op, operands)
        return self.narrow.operation(value.op, [self._narrowed(x) for x in operands])

    @staticmethod
    def _is_of_elements(letters: str) -> bool:
        return bool(set(letters) - set("kn"))

    def _narrowed(self, x: Any) -> Any:
        """An operand in the dtype of elements, or not yet rounded to it."""
        if isinstance(x, Truth):
            return x
        result = hull(x, rounded_to(x, self.narrow.compute))
        if not self.flushes:
            return result
        tiny = np.minimum(np.abs(x.low), np.abs(x.high)) < SMALLEST_NORMAL[self.narrow.compute]
        low, high = np.minimum(result.low, 0.0), np.maximum(result.high, 0.0)
        return Range(np.where(tiny, low, result.low), np.where(tiny, high, result.high), result.nan)

    def _statics(self, value: Node, key: Key) -> list[float]:
        operands = statics(value)
        self._evaluate(operands)
        return [float(self._get(x, key, "kn").low) for x in operands]

    def _load(self, buffer: str, key: Key) -> Any:
        loaded = super()._load(buffer, key)
        return loaded if isinstance(loaded, Range) else point(loaded)

    def _joined(self, op: Op, parts: Sequence[Any], of_tensors: bool) -> Any:
        ranges = [Range(*(np.ravel(x) for x in (part.low, part.high, part.nan))) for part in parts]
        whole = Range(*(np.concatenate([getattr(r, end) for r in ranges]) for end in ("low", "high", "nan")))
        joined = reduce_range(op, whole, (0,))
        return Range(*(x.reshape(()) for x in (joined.low, joined.high, joined.nan)))

    def _within(self, value: Node, operand: Any, key: Key) -> Any:
        removed = set(self._letters(value.args[0])) - set(self._letters(value))
        if removed & {*PARTS} or (set(self._letters(value)) & {*PARTS} and "b" in removed):
            raise RuleError("a reduction per axis of a tensor has no bound of its error")
        if operand.low.ndim < 3:
            return operand
        view = self.by_index[cast(int, key)].view
        x = self._narrowed(operand)
        if "b" in removed:
            x = Range(*(np.broadcast_to(e, (view.batch, *np.shape(e)[1:])) for e in (x.low, x.high, x.nan)))
        axes = tuple(i for i, letter in enumerate("bij") if letter in removed)
        return reduce_range(value.op, x, axes, PARTIAL_SUMS[self.narrow.compute])
