"""One step of a rule on MLX's arrays: elements where the parameters are, all else on the CPU's stream in float64.

Nothing is computed here: MLX is lazy, and `mx.compile` sees all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from rulec.compiler.view import MatrixView
from rulec.language.node import Node, Op
from rulec.mlx.arrays import LIBRARY
from rulec.pure import first
from rulec.pure.plan import StepPlan
from rulec.pure.step import BucketStep, Gaps, PureStep
from rulec.pure.values import Values
from rulec.runtime.state import StateSpec

#: Matrix functions that every device has; the others are the CPU's alone.
_ANYWHERE = frozenset({Op.MATMUL, Op.NEWTON_SCHULZ})


def one_step(
    plan: StepPlan, params: Sequence[Any], gradients: Sequence[Any], values: Values, hyper: Mapping[str, Any]
) -> tuple[list[Any], Values]:
    """New parameters in order, and the new state."""
    device = mx.default_device()
    with mx.stream(mx.cpu):
        step = PureStep(plan, params, gradients, values, [hyper], {}, None, MlxBucketStep)
        step.device = device
        return step.finished()


def first_values(plan: StepPlan, params: Sequence[Any], count: Any, hyper: Mapping[str, Any]) -> Values:
    """The state before the first step; states have their parameter's dtype, and numbers are float32."""
    with mx.stream(mx.cpu):
        return first.first_values(plan, params, [hyper], "float32", Values(count), LIBRARY, _stored)


def _stored(spec: StateSpec, value: Any, shape: tuple[int, ...], param: Any, view: MatrixView) -> Any:
    return LIBRARY.spread(LIBRARY.cast(value, spec.dtype), shape)


class _Gaps(Gaps):
    """Products of float32 and narrower are the device's."""

    def _matrix_function(self, value: Node) -> Callable[..., Any]:
        function = super()._matrix_function(value)

        def on_device(*operands: Any) -> Any:
            if any(isinstance(x, mx.array) and x.dtype == mx.float64 for x in operands):
                return function(*operands)
            with mx.stream(self.around.step.device):  # type: ignore[attr-defined]
                return function(*operands)

        return on_device if value.op in _ANYWHERE else function


class MlxBucketStep(BucketStep):
    """One bucket's share of a step."""

    library = LIBRARY
    gaps = _Gaps

    def launched(self, index: int, i: int, scalars: Sequence[Any]) -> Any:
        """One stage of leaf i, on the device."""
        with mx.stream(self.step.device):
            return super().launched(index, i, scalars)
