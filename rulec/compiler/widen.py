"""Values of fewer axes than they stand for: a state that is set to a number, or one arm of a branch.

A value has the axes of all arms of a branch, and a state those of its memory, though a line or an arm may give a
number. Lowering marks such a value by `WIDEN`. The marks end here: only a reduction, which counts, and a matrix
function, which needs a matrix, tell a number from as many equal numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rulec.compiler.simplify import fold_node
from rulec.language.expr.node import Kind, Node, Op, const, node, walk

#: The operations that tell a number from as many equal numbers.
_COUNTING = (Kind.REDUCE, Kind.MATRIX, Kind.SHAPE)


class Axes(Protocol):
    """`rulec.compiler.ir.Axes`, as far as it is read here."""

    @property
    def letters(self) -> str: ...
    @property
    def rows(self) -> Node | None: ...
    @property
    def cols(self) -> Node | None: ...
    @property
    def number(self) -> bool: ...
    @property
    def elementwise(self) -> bool: ...


class Inference(Protocol):
    """The axes of values."""

    def fitting(self, value: Node) -> Axes | None: ...


def widened(value: Node, axes: Axes, inference: Inference) -> Node:
    """The value, marked with these axes where it has fewer; the store of a value that does not fit says so."""
    have = inference.fitting(value)
    if have is None or not set(have.letters) < set(axes.letters):
        return value
    fits = have.rows in (None, axes.rows) and have.cols in (None, axes.cols)
    return node(Op.WIDEN, value, axes) if fits else value


def realized(roots: Sequence[Node], axes: Callable[[Node], Axes], memo: dict[Node, Node]) -> list[Node]:
    """The roots without marks: operands of reductions and matrix functions have the axes that they stand for.

    `memo` maps nodes to their new forms, as in `rewrite`.
    """
    for current in walk(roots, memo):
        operands = [memo[a] for a in current.args]
        if current.op is Op.WIDEN:
            memo[current] = operands[0]
            continue
        if current.op.kind in _COUNTING:
            operands = [_with_axes(x, axes(a), axes) for x, a in zip(operands, current.args, strict=True)]
        same = all(x is a for x, a in zip(operands, current.args, strict=True))
        memo[current] = current if same else fold_node(node(current.op, *operands, current.arg))
    return [memo[root] for root in roots]


def _with_axes(value: Node, wanted: Axes, axes: Callable[[Node], Axes]) -> Node:
    """The same value with the axes `wanted`: a choice between it and itself by a condition with these axes."""
    if set(wanted.letters) <= set(axes(value).letters):
        return value
    if wanted.elementwise:
        return node(Op.WHERE, node(Op.ISFINITE, node(Op.LOAD, "p")), value, value)
    if wanted.number:
        each = node(Op.FACT, "numel") if "n" in wanted.letters else node(Op.STEP, "group")
        return node(Op.WHERE, node(Op.GE, each, const(0)), value, value)
    return node(Op.WIDEN, value, wanted)
