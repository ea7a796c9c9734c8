"""Reductions over all gradients, needed before the first parameter is updated: a first backward pass computes them.

Examples are the norm for `clip_by_global_norm >> adamw`, and whether every gradient is finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from rulec.jax.library import LIBRARY, evaluated
from rulec.jax.recipe import Rules, rules_of
from rulec.language.compose.combine import map_nodes
from rulec.language.expr.node import LEVELS, Kind, Node, Op, name, names_in, rewrite, walk
from rulec.language.partition import Partition

#: Reduction -> how parts of it over all gradients are combined, and its first value.
_SUM = (jnp.add, 0.0)
_JOIN: Mapping[Op, tuple[Callable[..., Any], float]] = {
    Op.SUM: _SUM, Op.MEAN: _SUM, Op.NORM: _SUM, Op.RMS: _SUM, Op.COUNT_NONZERO: _SUM,
    Op.MIN: (jnp.minimum, float("inf")), Op.MAX: (jnp.maximum, float("-inf")),
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Reductions over all gradients by the names of a rule's inputs, and whether all gradients must be finite.

    The carried value has a float64 number for each reduction, the number of elements, and whether all are finite.
    """

    reductions: Mapping[str, Node]
    finite: bool
    maximize: bool

    def __bool__(self) -> bool:
        return bool(self.reductions) or self.finite

    def nothing(self) -> Any:
        """The carried value before any gradient."""
        starts = {key: jnp.float64(_JOIN[reduction.op][1]) for key, reduction in self.reductions.items()}
        return starts, jnp.float64(0), jnp.bool_(True)

    def more(self, known: Any, grads: Any) -> Any:
        """The carried value with these gradients too."""
        numbers, count, finite = known
        for grad in jax.tree.leaves(grads):
            g = LIBRARY.read(-grad if self.maximize else grad)
            numbers = {k: _JOIN[n.op][0](numbers[k], _part(n, g)) for k, n in self.reductions.items()}
            count = count + float(grad.size)
            finite = finite & jnp.all(jnp.isfinite(grad)) if self.finite else finite
        return numbers, count, finite

    def ok(self, known: Any) -> Any:
        """Whether all gradients are finite; None where this is not measured."""
        return known[2] if self.finite else None

    def one(self, known: Any, count: Any) -> Any:
        """1, from which a second backward pass begins. If XLA knew that, it would keep the first pass's gradients.

        It depends on all that is measured, so the second pass cannot begin before. `count` is never negative.
        """
        truth = known[2] if self.finite else next(iter(known[0].values())) > 0
        return jnp.where((jnp.max(count) < 0) & truth, 0, 1)

    def inputs(self, known: Any) -> dict[str, Any]:
        """The inputs of the rule, by name."""
        numbers, count, _ = known
        return {key: _whole(reduction.op, numbers[key], count) for key, reduction in self.reductions.items()}


def _part(reduction: Node, g: Any) -> Any:
    """The part of one gradient in a reduction, in float64; elements are computed in the dtype of `g`."""

    def leaf(value: Node) -> Any:
        return g if value.op is Op.NAME else jnp.asarray(value.arg, g.dtype)

    operand = reduction.args[0]
    x = evaluated([operand], leaf)[operand]
    if reduction.op in (Op.NORM, Op.RMS):
        x = x * x
    if reduction.op is Op.COUNT_NONZERO:
        x = x != 0
    if reduction.op in (Op.MIN, Op.MAX):
        return LIBRARY.reduce(reduction.op, x)
    return LIBRARY.reduce(Op.SUM, x)


def _whole(op: Op, total: Any, count: Any) -> Any:
    mean = total / count if op in (Op.MEAN, Op.RMS) else total
    return jnp.sqrt(mean) if op in (Op.NORM, Op.RMS) else mean


def in_two_passes(rule: Rules) -> tuple[Rules, dict[str, Node]]:
    """The rule with inputs in the place of its reductions over all raw gradients, and input -> reduction.

    A rule that reduces anything else over more than a tensor comes back unchanged, and so does a partition.
    """
    if isinstance(rule, Partition):
        return rule, {}
    (single,) = rules_of(rule)
    keys: dict[Node, str] = {}

    def change(value: Node) -> Node:
        if not _of_gradients(value):
            return value
        return name(keys.setdefault(value, f"measured_{len(keys) + 1}"))

    step = map_nodes(single.step, lambda value: rewrite([value], change)[0])
    skip = None if single.skip is None else rewrite([single.skip], change)[0]
    inputs = dict.fromkeys(keys.values(), "scalar")
    changed = replace(single, step=step, skip=skip, inputs={**single.inputs, **inputs}, function=None)
    if not keys or single.applies_to is not None or changed.analysis.scope in LEVELS[LEVELS.index("tensor") + 1 :]:
        return single, {}
    return changed, {key: value for value, key in keys.items()}


def _of_gradients(value: Node) -> bool:
    """Whether a value is a reduction over all tensors of something of the raw gradient's elements alone."""
    if value.op not in _JOIN or value.arg not in LEVELS[LEVELS.index("tensor") + 1 :]:
        return False
    plain = all(part.op.kind not in (Kind.REDUCE, Kind.MATRIX, Kind.RANDOM, Kind.CALL) for part in walk(value.args))
    return plain and {*names_in(value.args)} <= {"g", "grad"}
