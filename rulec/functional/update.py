"""A program for the change of its parameter in place of the new parameter.

Transformations in the manner of optax return updates to be added later. The change in `p - change` is returned without
rounding: `(p - change) - p` would keep only the digits of `p`.
"""

from __future__ import annotations

from dataclasses import replace

from rulec.compiler.ir import Program, Store
from rulec.language.expr.node import Node, Op, node, walk

_P = node(Op.LOAD, "p")


def as_update(program: Program) -> Program:
    """The same program with the change of the parameter stored in `p`."""
    stages = [replace(stage, stores=tuple(map(_changed, stage.stores))) for stage in program.stages]
    values = {s.value: "update" for stage in stages for s in stage.stores if s.buffer == "p"}
    return replace(program, stages=tuple(stages), labels={**program.labels, **values})


def _changed(store: Store) -> Store:
    return replace(store, value=_change(store.value)) if store.buffer == "p" else store


def _change(value: Node) -> Node:
    """`value - p`, without `p` where it is a sum that begins with `p`."""
    change = _beside(value)
    return node(Op.SUB, value, _P) if change is None else change


def _beside(value: Node) -> Node | None:
    """The value `x` in a sum `p + x`, also with further terms; None for a value of another form."""
    beside: dict[Node, Node] = {}
    for part in walk([value]):
        if part.op not in (Op.ADD, Op.SUB):
            continue
        for first, second in (part.args, part.args[::-1])[: 2 if part.op is Op.ADD else 1]:
            if first is _P:
                beside[part] = second if part.op is Op.ADD else node(Op.NEG, second)
            elif first in beside:
                beside[part] = node(part.op, beside[first], second)
            if part in beside:
                break
    return beside.get(value)
