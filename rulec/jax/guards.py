"""Matrix functions that a step wants under a condition alone, such as every tenth step.

Both arms of a branch are values of one program; XLA would work out both at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rulec.compiler.ir import Program
from rulec.language.node import Kind, Node, Op, walk


@dataclass(frozen=True)
class Guard:
    """A value is wanted only where `condition` is `truth`."""

    condition: Node
    truth: bool


def guards_of(program: Program) -> Mapping[Node, Guard]:
    """The matrix functions that are wanted under one condition alone."""
    roots = [c.value for c in program.late] + [v.value for v in program.vectors] + [s.value for s in program.finish]
    roots += [root for stage in program.stages for root in stage.roots]
    roots += [program.skip] if program.skip is not None else []
    found: dict[Node, Guard | None] = dict.fromkeys(roots)
    # Whoever uses a value comes after it in a walk: from the last to the first, all uses are known.
    for user in reversed([*walk(roots)]):
        for place, operand in enumerate(user.args):
            _note(found, operand, _guard_of_use(user, place, found[user]))
    return {v: guard for v, guard in found.items() if guard is not None and _is_costly(v)}


def _note(found: dict[Node, Guard | None], value: Node, guard: Guard | None) -> None:
    found[value] = guard if value not in found or found[value] == guard else None


def _guard_of_use(user: Node, place: int, own: Guard | None) -> Guard | None:
    """Under which condition a user wants its operand at this place, where it is itself wanted under `own`."""
    return Guard(user.args[0], place == 1) if user.op is Op.WHERE and place > 0 else own


def _is_costly(value: Node) -> bool:
    return value.op.kind is Kind.MATRIX and value.op is not Op.TRANSPOSE


def where_wanted(wanted: Any, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """What the function gives where `wanted` is true, else zeros of its shape, which nobody reads."""
    arrays = [x for x in operands if isinstance(x, jax.Array)]

    def compute(given: Sequence[Any]) -> Any:
        rest = iter(given)
        return function(*(next(rest) if isinstance(x, jax.Array) else x for x in operands))

    shape = jax.eval_shape(compute, arrays)
    return jax.lax.cond(wanted, compute, lambda _: jnp.zeros(shape.shape, shape.dtype), arrays)
