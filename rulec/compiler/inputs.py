"""The shapes of inputs, and random numbers for them in tests and traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rulec.compiler.scalars import evaluate_once
from rulec.compiler.view import static_defaults, view_of
from rulec.language.expr.node import FACTS, Op, node, rewrite
from rulec.language.inputs import LIKE_P, InputKind
from rulec.language.rule_data import RuleData

Array = np.ndarray[Any, Any]


def input_shape(
    rule: RuleData, kind: InputKind, shape: Sequence[int], hyper: Mapping[str, float] | None = None
) -> tuple[int, ...]:  # fmt: skip
    """The shape of an input of this kind for a tensor of this shape; `hyper` has static hyper-parameters."""
    static = {**static_defaults(rule), **(hyper or {})}
    if isinstance(kind, str):
        return tuple(shape) if kind == LIKE_P else ()
    view = view_of(rule, shape, static)
    rows, cols = (int(evaluate_once(_leaves(extent), static, view.facts, {})) for extent in kind.extents)
    return view.kept_shape(rows, cols)


def drawn_input(
    rule: RuleData, kind: InputKind, shape: Sequence[int], rng: np.random.Generator,
    hyper: Mapping[str, float] | None = None,
) -> Array:  # fmt: skip
    """Normal random numbers for an input of a tensor. A square matrix is symmetric and positive definite."""
    extents = input_shape(rule, kind, shape, hyper)
    numbers = np.asarray(rng.normal(size=extents))
    if isinstance(kind, str) or extents[-1] != extents[-2]:
        return numbers
    return numbers @ numbers.swapaxes(-1, -2) / max(extents[-1], 1) + 0.1 * np.eye(extents[-1])


def _leaves(extent: Any) -> Any:
    """An extent with shape facts and hyper-parameters in place of names."""

    def leaf(value: Any) -> Any:
        if value.op is not Op.NAME:
            return value
        return node(Op.FACT if value.arg in FACTS else Op.HYPER, value.arg)

    return rewrite([extent], leaf)[0]
