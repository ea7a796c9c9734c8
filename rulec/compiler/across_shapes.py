"""Reductions over several tensors in a rule that is another program for another shape.

Programs of all shapes take part in the same reductions. A reduction is known by its text, as two texts may mean one
value for tensors of one shape, and two for those of another. A value that depends on the shape is one of each tensor,
though an arm of a branch may give a number, or a value of the group.
"""

from __future__ import annotations

from collections import Counter

from rulec.compiler.ir import axes_of_letters
from rulec.errors import RuleError
from rulec.language.expr.node import FACTS, Kind, Node, Op, const, names_in, node, walk
from rulec.language.rule_data import Assign, Branch, assignments

#: Levels that several tensors share.
WIDE_LEVELS = ("group", "model")

_TENSOR = axes_of_letters("kn")


def apart(name: str, what: str = "tensors") -> RuleError:
    """The error of tensors that take part in other reductions than the others."""
    return RuleError(
        f"the {what} of {name} do not all have the same values across the model: reduce per group and per model "
        f"outside of branches on the shape, and use the result for every shape"
    )


def is_wide(value: Node) -> bool:
    """Whether a value is a reduction over several tensors."""
    return value.op.kind is Kind.REDUCE and value.arg in WIDE_LEVELS


class AcrossShapes:
    """What is known of names at a line, the same for all shapes."""

    def __init__(self) -> None:
        #: How often each name was assigned, with the arms that other shapes take.
        self.assigned: Counter[str] = Counter()
        #: The names of values that depend on the shape.
        self.of_shape: set[str] = set()
        self._written: dict[tuple[Node, tuple[int, ...]], int] = {}

    def assign(self, line: Assign, nested: bool) -> None:
        """Follows an assignment, `nested` in an arm of a branch."""
        self.assigned[line.target] += 1
        if self._depends(line.value):
            self.of_shape.add(line.target)
        elif not nested:
            self.of_shape.discard(line.target)

    def leave(self, line: Branch, before: Counter[str]) -> None:
        """Follows a branch, where `before` was `assigned` before it: arms that other shapes take count too."""
        targets = Counter(inner.target for inner in assignments((line,)))
        self.assigned = before + targets
        if self._depends(line.condition):
            self.of_shape.update(targets)

    def marked(self, value: Node) -> Node:
        """A reduction over several tensors with the number of its text, over a value of each tensor if it depends so.

        The same text of the same values has one number.
        """
        if not is_wide(value):
            return value
        text = value, tuple(self.assigned[name] for name in sorted(names_in([value])))
        number = const(self._written.setdefault(text, len(self._written)))
        operand, *others = value.args
        if self._depends(operand):
            operand = node(Op.WIDEN, operand, _TENSOR)
        return node(value.op, operand, *others, number, value.arg)

    def _depends(self, text: Node) -> bool:
        """Whether the value of an expression depends on the shape of a tensor: but not through other tensors'."""
        parts = walk([text], {n for n in walk([text]) if is_wide(n)})
        return any(
            n.op in (Op.DIM, Op.INDEX) or (n.op in (Op.NAME, Op.FACT) and (n.arg in FACTS or n.arg in self.of_shape))
            for n in parts
        )
