"""Statistics apart from the step, so that XLA compiles the step as it does without them, to the same bits.

XLA may contract a product and a sum or not, by what else is computed of them. A step's arrays are therefore other
values for its statistics, of which nothing is computed together with the step. Matrix functions, which take most of
such a step, are taken from the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from rulec.compiler.ir import Program
from rulec.functional.plan import Bucket, guards_of
from rulec.functional.quantized import Coded, Unbiased
from rulec.jax.packing import unpiece
from rulec.language.expr.node import Node, Op, rewrite


def apart(tree: Any) -> Any:
    """The same arrays as other values for XLA, so that no computation is shared with the arrays of the tree."""
    whole = jax.tree.map(unpiece, tree, is_leaf=lambda x: isinstance(x, Coded | Unbiased))
    structure: Any
    leaves, structure = jax.tree.flatten(whole)
    arrays = iter(jax.lax.optimization_barrier([x for x in leaves if isinstance(x, jax.Array)]))  # type: ignore[no-untyped-call]
    return structure.unflatten([next(arrays) if isinstance(x, jax.Array) else x for x in leaves])


@dataclass(frozen=True)
class Computed:
    """The results of the matrix functions of a step under a program, by their values in it."""

    program: Program
    matrices: Mapping[Node, Any]

    def result(self, value: Node, bucket: Bucket) -> Any:
        """The results of the same matrix function in the program of a bucket; None where the step has none.

        Under a guard the step may have left it out.
        """
        known = self._whole.get(Whole(bucket.program).expression(value))
        if known is None or (known in self._guards and value not in bucket.guards):
            return None
        return apart(self.matrices[known])

    @cached_property
    def _whole(self) -> Mapping[Node, Node]:
        """The values by their whole expressions, which are the same in all programs of a rule."""
        whole = Whole(self.program)
        return {whole.expression(value): value for value in self.matrices}

    @cached_property
    def _guards(self) -> Mapping[Node, Any]:
        return guards_of(self.program)


class Whole:
    """Values of a program without the names that it gives to results, columns and scratch memory."""

    def __init__(self, program: Program) -> None:
        self._program, self._known = program, dict[Node, Node]()
        self._scratch = {b.name for b in program.buffers if b.role == "scratch"}
        self._stores = {s.buffer: s.value for stage in program.stages for s in stage.stores}

    def expression(self, value: Node) -> Node:
        """The whole expression of a value."""
        return rewrite([value], self._without_name, self._known)[0]

    def _without_name(self, value: Node) -> Node:
        if value.op is Op.RESULT:
            return self.expression(self._program.result(str(value.arg)).value)
        if value.op is Op.SCALAR:
            return self.expression(self._program.columns[int(value.arg)].value)  # type: ignore[call-overload]
        if value.op is Op.LOAD and value.arg in self._scratch:
            return self.expression(self._stores[str(value.arg)])
        return value
