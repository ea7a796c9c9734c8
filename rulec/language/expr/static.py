"""The constants of operations: words and numbers of a node, and operands that are known for each shape.

A static operand is an extent, a rank or a bound: an expression of shape facts and static hyper-parameters. A rule's
text has it among the operands. Lowering moves it into the node's constant, so that no table of scalars has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from rulec.language.expr.node import Node, Op, node

#: Operation -> the keywords that its constant has values for, in their order.
SETTINGS: Mapping[Op, tuple[str, ...]] = {
    Op.NEWTON_SCHULZ: ("dtype", "coefficients", "normalize", "form"), Op.SOLVE: ("kind",), Op.CONCAT: ("axis",),
    Op.SLICE: ("axis",), Op.UNIFORM: ("draw",), Op.NORMAL: ("draw",),
}  # fmt: skip

#: Operation with static operands -> the number of operands before them.
STATIC: Mapping[Op, int] = {Op.UNIFORM: 1, Op.NORMAL: 1, Op.EYE: 0, Op.SLICE: 1, Op.SINGULAR_VECTORS: 1}

#: The coefficients of `newton_schulz` that a rule need not name: those of Muon.
MUON = "muon"

#: What `newton_schulz` divides its matrix by, where a rule does not say: its norm. The node has no constant for it.
NORM, UNDIVIDED = "norm", "none"

#: How `newton_schulz` is computed: by products with its matrix, which a rule need not name, or with its Gram matrix.
DIRECT, GRAM = "direct", "gram"


def settings(value: Node) -> dict[str, Any]:
    """The keywords of an operation, as its node has them."""
    arg = value.arg if isinstance(value.arg, tuple) else (value.arg,)
    return dict(zip(SETTINGS.get(value.op, ()), arg, strict=False))


def statics(value: Node) -> tuple[Node, ...]:
    """The static operands of an operation, before and after lowering."""
    if value.op not in STATIC:
        return ()
    inside = cast(tuple[Node, ...], value.arg)[len(SETTINGS.get(value.op, ())) :] if is_lowered(value) else ()
    return value.args[STATIC[value.op] :] or inside


def is_lowered(value: Node) -> bool:
    """Whether the static operands are in the node's constant."""
    return value.op in STATIC and len(value.args) == STATIC[value.op]


def lowered(value: Node) -> Node:
    """The operation with its static operands in its constant; any other node as it is."""
    if value.op not in STATIC or is_lowered(value):
        return value
    count = STATIC[value.op]
    constants = tuple(settings(value).values())
    return node(value.op, *value.args[:count], (*constants, *value.args[count:]))
