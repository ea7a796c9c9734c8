"""Sums that are rounded before XLA goes on: of `(x + a) - b` with numbers a and b it would make `x + (a - b)`.

A rule that rounds to a grid adds a large number and takes it away again, and would not round at all.
"""

from __future__ import annotations

from functools import cached_property

from rulec.backend.printer import StagePrinter
from rulec.language.node import Node, Op, walk


class SumPrinter(StagePrinter):
    """Prints `rounded(x + a) - b` for a sum with a number that another number is added to, or taken from."""

    @cached_property
    def _held(self) -> set[Node]:
        sums = [value for value in walk(self.stage.roots) if _has_number(value)]
        return {part for value in sums for part in value.args if _has_number(part)}

    def text(self, value: Node, defining: bool = False) -> str:
        """A value as an expression over the names of the lines before it."""
        text, is_name = super().text(value, defining), value in self.names and not defining
        return f"rounded({text})" if value in self._held and not is_name else text


def _has_number(value: Node) -> bool:
    """Whether it is a sum or a difference with one number for all elements."""
    return value.op in (Op.ADD, Op.SUB) and any(part.op in (Op.CONST, Op.SCALAR) for part in value.args)
