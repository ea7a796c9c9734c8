"""One step of a rule on MLX's arrays: elements where the parameters are, all else on the CPU's stream in float64.

Nothing is computed here: MLX is lazy, and `mx.compile` sees all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from rulec.mlx.arrays import LIBRARY
from rulec.pure import first
from rulec.pure.plan import StepPlan
from rulec.pure.step import run_step
from rulec.pure.step_values import StepValues
from rulec.pure.values import Values


def one_step(
    plan: StepPlan, params: Sequence[Any], gradients: Sequence[Any], values: Values, hyper: Mapping[str, Any]
) -> tuple[list[Any], Values]:
    """New parameters in order, and the new state."""
    device = mx.default_device()
    with mx.stream(mx.cpu):
        step = StepValues(plan, params, gradients, values, [hyper], {}, None, LIBRARY)
        step.on_device = lambda: mx.stream(device)
        return run_step(step)


def first_values(plan: StepPlan, params: Sequence[Any], count: Any, hyper: Mapping[str, Any]) -> Values:
    """The state before the first step; states have their parameter's dtype, and numbers are float32."""
    with mx.stream(mx.cpu):
        return first.first_values(plan, params, [hyper], "float32", Values(count), LIBRARY)
