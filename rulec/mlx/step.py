"""One step on MLX's arrays, which `mx.compile` may trace, and the values of a state before the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from rulec.compiler.ir import Buffer
from rulec.functional import init
from rulec.functional.apart import ApartStep, run_apart
from rulec.functional.plan import StepPlan
from rulec.functional.step import run_step
from rulec.functional.step_values import Statistics, StepValues
from rulec.functional.values import Values
from rulec.language.statistics import PREFIX
from rulec.mlx.arrays import LIBRARY, apart


class MlxBucketStep(ApartStep):
    """One bucket's share of a step. A statistic of its leaves is one vector, at the place of the first."""

    def note(self, buffer: Buffer, value: Any, skip_mask: Sequence[Any] | None) -> None:
        """Notes the numbers of a statistic: of the leaves in order, or one of their group or model."""
        if buffer.axes.number:
            numbers = self.library.spread(self.library.cast(value, "float64"), (len(self),))
            numbers = numbers if "n" in buffer.axes.letters else numbers[:1]
        else:
            numbers = self.library.join([self.library.cast(each, "float64").reshape(-1) for each in value], 0)
        name, first = buffer.name.removeprefix(PREFIX), self.bucket.places[0]
        # A step is skipped for all leaves, or for none.
        numbers = self._unless(skip_mask, 0, self.library.constant(float("nan")), numbers)
        self.step.statistics.setdefault(name, {})[first] = numbers


def one_step(
    plan: StepPlan, params: Sequence[Any], gradients: Sequence[Any], values: Values, hyper: Mapping[str, Any],
    traced: bool,
) -> tuple[list[Any], Values, Statistics]:  # fmt: skip
    """New parameters in order, the new state, and the statistics.

    `mx.compile` fuses a value or not by what else is computed of it. In a `traced` step the statistics are therefore a
    computation of their own, and the step has the same bits without them.
    """
    device = mx.default_device()

    def values_of(plan: StepPlan, *operands: Any) -> StepValues:
        step = StepValues(plan, *operands)
        step.on_device = lambda: mx.stream(device)
        return step

    def apart_on_device(tree: Any) -> Any:
        with mx.stream(device):
            return apart(tree)

    operands: tuple[Any, ...] = params, gradients, values, [hyper], {}, None, LIBRARY
    with mx.stream(mx.cpu):
        if traced and plan.options.watch:
            return run_apart(plan, operands, values_of, MlxBucketStep, apart_on_device)
        step = values_of(plan, *operands)
        return *run_step(step, MlxBucketStep), step.statistics


def first_values(plan: StepPlan, params: Sequence[Any], count: Any, hyper: Mapping[str, Any]) -> Values:
    """The state before the first step; states have their parameter's dtype, and numbers are float32."""
    with mx.stream(mx.cpu):
        return init.first_values(plan, params, [hyper], "float32", Values(count), LIBRARY)
