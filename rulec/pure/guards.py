"""Matrix functions that a step wants under a condition alone, such as every tenth step.

Both arms of a branch are values of one program. Without a guard a framework would compute both at every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rulec.compiler.ir import Program
from rulec.language.node import Kind, Node, Op, walk


@dataclass(frozen=True)
class Guard:
    """A value is wanted only where `condition` is `truth`."""

    condition: Node
    truth: bool


def guards_of(program: Program) -> Mapping[Node, Guard]:
    """The matrix functions that are wanted under one condition alone."""
    roots = program.between
    roots += [root for stage in program.stages for root in stage.roots]
    roots += [program.skip] if program.skip is not None else []
    guards: dict[Node, Guard | None] = dict.fromkeys(roots)
    # Whoever uses a value comes after it in a walk: from the last to the first, all uses are known.
    for user in reversed([*walk(roots)]):
        for place, operand in enumerate(user.args):
            _note(guards, operand, _guard_of_use(user, place, guards[user]))
    return {v: guard for v, guard in guards.items() if guard is not None and _is_costly(v)}


def _note(guards: dict[Node, Guard | None], value: Node, guard: Guard | None) -> None:
    guards[value] = guard if value not in guards or guards[value] == guard else None


def _guard_of_use(user: Node, place: int, guard: Guard | None) -> Guard | None:
    """The guard of the operand at this place of a value that is itself wanted under `guard`."""
    return Guard(user.args[0], place == 1) if user.op is Op.WHERE and place > 0 else guard


def _is_costly(value: Node) -> bool:
    return value.op.kind is Kind.MATRIX and value.op is not Op.TRANSPOSE
