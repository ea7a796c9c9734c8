"""Statistics apart from the step, so that a framework compiles the step as it does without them, to the same bits.

A compiler may contract a product and a sum or not, by what else is computed of them. A step's arrays are therefore
other values for its statistics, of which nothing is computed together with the step. Matrix functions, which take most
of such a step, are taken from the step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rulec.compiler.ir import Program
from rulec.functional.bucket_step import BucketStep, Gaps
from rulec.functional.plan import Bucket, StepPlan, guards_of
from rulec.functional.step import run_buckets
from rulec.functional.step_values import Statistics, StepValues
from rulec.functional.values import Values
from rulec.language.expr.node import Kind, Node, Op, rewrite
from rulec.runtime.buckets.reductions import Waits

#: The same arrays of a tree as other values for a compiler, which shares no computation of them.
Apart = Callable[[Any], Any]


class ApartGaps(Gaps):
    """Keeps the results of matrix functions for the statistics, which take them from the step."""

    def _value(self, value: Node) -> Generator[Waits, Any, Any]:
        if value.op.kind is not Kind.MATRIX or value.op is Op.TRANSPOSE:
            return (yield from super()._value(value))
        source: ApartStep = self.source  # type: ignore[assignment]
        known = None if source.computed is None else source.computed.result(value, source.bucket)
        source.matrix_values[value] = (yield from self._matrix(value)) if known is None else known
        return source.matrix_values[value]

    def _matrix(self, value: Node) -> Generator[Waits, Any, Any]:
        """A matrix function of all tensors."""
        return (yield from super()._value(value))


class ApartStep(BucketStep):
    """One bucket's share of a step, or with `computed` of its statistics alone, of values that are computed already."""

    gaps = ApartGaps

    def __init__(self, step: StepValues, bucket: Bucket, computed: Computed | None = None) -> None:
        super().__init__(step, bucket)
        self.computed = computed
        #: The results of matrix functions, by the value in the program.
        self.matrix_values: dict[Node, Any] = {}


def run_apart(
    plan: StepPlan, operands: tuple[Any, ...], values_of: Callable[..., StepValues], kind: type[ApartStep], apart: Apart
) -> tuple[list[Any], Values, Statistics]:
    """The results of all leaves in order, the new state, and the statistics, as a computation of their own.

    `values_of` makes the values of a step from a plan and the `operands` of `StepValues`.
    """
    step = values_of(plan.plain, *operands)
    runs = [kind(step, bucket) for bucket in plan.plain.buckets]
    results, new = run_buckets(step, runs)
    params, grads, (count, arrays, numbers), *others = operands
    old = count, {name: {**of_leaves} for name, of_leaves in arrays.items()}, numbers
    params, grads, old, others = apart((params, grads, old, others))
    measured = values_of(plan, params, grads, Values(*old), *others)
    known = (Computed(run.program, run.matrix_values, apart) for run in runs)
    run_buckets(measured, [kind(measured, *each) for each in zip(plan.buckets, known, strict=True)])
    return results, new, measured.statistics


@dataclass(frozen=True)
class Computed:
    """The results of the matrix functions of a step under a program, by their values in it."""

    program: Program
    matrices: Mapping[Node, Any]
    apart: Apart

    def result(self, value: Node, bucket: Bucket) -> Any:
        """The results of the same matrix function in the program of a bucket; None where the step has none.

        Under a guard the step may have left it out.
        """
        known = self._whole.get(Whole(bucket.program).expression(value))
        if known is None or (known in self._guards and value not in bucket.guards):
            return None
        return self.apart(self.matrices[known])

    @cached_property
    def _whole(self) -> Mapping[Node, Node]:
        """The values by their whole expressions, which are the same in all programs of a rule."""
        whole = Whole(self.program)
        return {whole.expression(value): value for value in self.matrices}

    @cached_property
    def _guards(self) -> Mapping[Node, Any]:
        return guards_of(self.program)


class Whole:
    """Values of a program without the names that it gives to results, columns and scratch memory."""

    def __init__(self, program: Program) -> None:
        self._program, self._known = program, dict[Node, Node]()
        self._scratch = {b.name for b in program.buffers if b.role == "scratch"}
        self._stores = {s.buffer: s.value for stage in program.stages for s in stage.stores}

    def expression(self, value: Node) -> Node:
        """The whole expression of a value."""
        return rewrite([value], self._without_name, self._known)[0]

    def _without_name(self, value: Node) -> Node:
        if value.op is Op.RESULT:
            return self.expression(self._program.result(str(value.arg)).value)
        if value.op is Op.SCALAR:
            return self.expression(self._program.columns[int(value.arg)].value)  # type: ignore[call-overload]
        if value.op is Op.LOAD and value.arg in self._scratch:
            return self.expression(self._stores[str(value.arg)])
        return value
