"""What must be known of all gradients before the first parameter is updated: a backward pass of its own finds it out.

Such are the norm that `clip_by_global_norm >> adamw` scales by, and whether every gradient is finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from rulec.jax.recipe import Rules, rules_of
from rulec.jax.values import LIBRARY, evaluated
from rulec.language.compose import map_nodes
from rulec.language.node import LEVELS, Kind, Node, Op, name, names_in, rewrite, walk
from rulec.language.partition import Partition

#: How parts of a reduction over all gradients are put together, and what it begins with.
_SUM = (jnp.add, 0.0)
_JOIN: Mapping[Op, tuple[Callable[..., Any], float]] = {
    Op.SUM: _SUM, Op.MEAN: _SUM, Op.NORM: _SUM, Op.RMS: _SUM, Op.COUNT_NONZERO: _SUM,
    Op.MIN: (jnp.minimum, float("inf")), Op.MAX: (jnp.maximum, float("-inf")),
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Reductions over all gradients by the names of a rule's inputs, and whether all must be finite.

    While they are worked out there is a number in float64 for each, and the number of elements; then the truth.
    """

    reductions: Mapping[str, Node]
    finite: bool
    maximize: bool

    def __bool__(self) -> bool:
        return bool(self.reductions) or self.finite

    def nothing(self) -> Any:
        """What is known before any gradient is."""
        starts = {key: jnp.float64(_JOIN[found.op][1]) for key, found in self.reductions.items()}
        return starts, jnp.float64(0), jnp.bool_(True)

    def more(self, known: Any, grads: Any) -> Any:
        """What is known with these gradients too."""
        numbers, count, finite = known
        for grad in jax.tree.leaves(grads):
            g = LIBRARY.read(-grad if self.maximize else grad)
            numbers = {k: _JOIN[n.op][0](numbers[k], _part(n, g)) for k, n in self.reductions.items()}
            count = count + float(grad.size)
            finite = finite & jnp.all(jnp.isfinite(grad)) if self.finite else finite
        return numbers, count, finite

    def ok(self, known: Any) -> Any:
        """Whether all gradients are finite; None where nobody asked."""
        return known[2] if self.finite else None

    def one(self, known: Any, count: Any) -> Any:
        """1, for a second backward pass to begin with; XLA does not know it, or it would keep what the first one made.

        It is there when all is known, so nothing of the second pass is worked out before. `count` is never negative.
        """
        truth = known[2] if self.finite else next(iter(known[0].values())) > 0
        return jnp.where((jnp.max(count) < 0) & truth, 0, 1)

    def inputs(self, known: Any) -> dict[str, Any]:
        """The inputs of the rule."""
        numbers, count, _ = known
        return {key: _whole(found.op, numbers[key], count) for key, found in self.reductions.items()}


def _part(reduction: Node, g: Any) -> Any:
    """What one gradient adds to a reduction, in float64; elements are worked out in the dtype of `g`."""

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
    """The rule with inputs for what it reduces of all raw gradients, and these reductions by the inputs' names.

    A rule that reduces anything else over more than a tensor comes back as it is; so do several.
    """
    if isinstance(rule, Partition):
        return rule, {}
    (own,) = rules_of(rule)
    found: dict[Node, str] = {}

    def change(value: Node) -> Node:
        if not _of_gradients(value):
            return value
        return name(found.setdefault(value, f"measured_{len(found) + 1}"))

    step = map_nodes(own.step, lambda value: rewrite([value], change)[0])
    skip = None if own.skip is None else rewrite([own.skip], change)[0]
    inputs = dict.fromkeys(found.values(), "scalar")
    made = replace(own, step=step, skip=skip, inputs={**own.inputs, **inputs}, function=None)
    if not found or own.applies_to is not None or made.analysis.scope in LEVELS[LEVELS.index("tensor") + 1 :]:
        return own, {}
    return made, {key: value for value, key in found.items()}


def _of_gradients(value: Node) -> bool:
    """Whether a value is a reduction over all tensors of something of the raw gradient's elements alone."""
    if value.op not in _JOIN or value.arg not in LEVELS[LEVELS.index("tensor") + 1 :]:
        return False
    plain = all(part.op.kind not in (Kind.REDUCE, Kind.MATRIX, Kind.RANDOM, Kind.CALL) for part in walk(value.args))
    return plain and {*names_in(value.args)} <= {"g", "grad"}
