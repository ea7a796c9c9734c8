"""Sums rounded explicitly: XLA would turn `(x + a) - b` with numbers a and b into `x + (a - b)`.

A rule that rounds to a grid adds a large number and subtracts it again. With XLA's change it would not round at all.
"""

from __future__ import annotations

from functools import cached_property

from rulec.backend.printer import StagePrinter
from rulec.language.expr.node import Node, Op, walk


class SumPrinter(StagePrinter):
    """Prints `rounded(x + a) - b` for a sum with a number, where another number is added or subtracted."""

    @cached_property
    def _held(self) -> set[Node]:
        sums = [value for value in walk(self.stage.roots) if _has_number(value)]
        return {part for value in sums for part in value.args if _has_number(part)}

    def text(self, value: Node, defining: bool = False) -> str:
        """A value as an expression over the names of earlier lines."""
        text, is_name = super().text(value, defining), value in self.names and not defining
        return f"rounded({text})" if value in self._held and not is_name else text


def _has_number(value: Node) -> bool:
    """Whether a value is a sum or a difference with one number for all elements."""
    return value.op in (Op.ADD, Op.SUB) and any(part.op in (Op.CONST, Op.SCALAR) for part in value.args)
